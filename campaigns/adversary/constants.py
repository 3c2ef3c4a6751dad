"""Constants that a rewrite with a tolerance loses, rounds, or takes for another."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from adversary.case import Group, normal, uniform

CASES = Group("constants", "a small constant, or one near 0 or 1")
right = CASES.right
X = normal(2, 8)

right("add 1e-8", lambda self, x: x + 1e-8, x=X)
right("add 1e-12", lambda self, x: x + 1e-12, x=X)
right("subtract 3e-9", lambda self, x: x - 3e-9, x=X)
right("add 1e-30", lambda self, x: x + 1e-30, x=X)
right("times one and a bit", lambda self, x: x * 1.000009, x=X)
right("times nearly one in fp64", lambda self, x: x * 1.000001, x=X)
right("divided by nearly one", lambda self, x: x / 0.999995, x=X)
right("power nearly one", lambda self, x: x.abs() ** 1.000005, x=X)
right("power nearly two", lambda self, x: x.abs() ** 1.99999, x=X)
right("power nearly a half", lambda self, x: (x.abs() + 1) ** 0.500004, x=X)
right("log of p and a bit", lambda self, p: torch.log(p + 1e-10), p=uniform(2, 8))
right("log of p times log p", lambda self, p: -(p * torch.log(p + 1e-9)).sum(-1), p=uniform(2, 8))
right("over norm", lambda self, x: x / (x.norm(dim=-1, keepdim=True) + 1e-8), x=X)
right(
    "over deviation",
    lambda self, x: (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-8),
    x=X,
)
right("over sum", lambda self, x: x / (x.abs().sum(-1, keepdim=True) + 1e-12), x=X)
right(
    "rsqrt of nothing",
    lambda self, x: torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-12) * x,
    x=X,
)
right(
    "pixel norm",
    lambda self, x: x * torch.rsqrt(x.square().mean(1, keepdim=True) + 1e-8),
    x=normal(2, 8, 3, 3),
)
right(
    "pixel norm by division",
    lambda self, x: x / torch.sqrt(x.square().mean(1, keepdim=True) + 1e-8),
    x=normal(2, 8, 3, 3),
)
right(
    "cosine similarity",
    lambda self, x, y: F.cosine_similarity(x, y, dim=-1, eps=1e-8),
    x=X,
    y=normal(2, 8, seed=4),
)
right(
    "cosine by hand",
    lambda self, x, y: (x * y).sum(-1) / (x.norm(dim=-1) * y.norm(dim=-1) + 1e-8),
    x=X,
    y=normal(2, 8, seed=4),
)
right("normalize", lambda self, x: F.normalize(x, dim=-1, eps=1e-12), x=X)
right("normalize with a large eps", lambda self, x: F.normalize(x, dim=-1, eps=0.5), x=X)
right("clamp to a small minimum", lambda self, x: x.abs().clamp(min=1e-9).log(), x=X)
right("clamp to 1e-20", lambda self, x: 1 / x.abs().clamp(min=1e-20), x=X)
right("maximum with 1e-9", lambda self, x: torch.maximum(x, torch.tensor(1e-9)).log(), x=X)
right("where a small constant", lambda self, x: torch.where(x > 0, x, 1e-9), x=X)
right("greater than 1e-9", lambda self, x: x > 1e-9, x=X)
right("equal to a tenth", lambda self, x: (x == 0.1).float() + x, x=X)
right("add then subtract a lot", lambda self, x: (x + 1e8) - 1e8, x=X)
right("add and subtract the same", lambda self, x: (x + 0.1) - 0.1, x=X)
right("multiply and divide the same", lambda self, x: (x * 3.0) / 3.0, x=X)
right("double negation", lambda self, x: x.neg().neg() + 1e-9, x=X)
right("scale by 1e-8 and back", lambda self, x: (x * 1e-8) * 1e8, x=X)
right("times 1e-20 times 1e20", lambda self, x: (x * 1e-20) * 1e20, x=X)
right("times 1e-30 twice", lambda self, x: (x * 1e-30) * 1e-30 + x, x=X)
right("times zero", lambda self, x: x * 0.0, x=X)
right("add zero", lambda self, x: x + 0.0, x=X)
right("subtract from zero", lambda self, x: 0.0 - x, x=X)
right("add negative zero", lambda self, x: 1 / (x.abs() + -0.0), x=X)
right("power zero", lambda self, x: x**0, x=X)
right("power one", lambda self, x: x**1.0, x=X)
right("pi", lambda self, x: torch.sin(x * math.pi), x=X)
right("large constant", lambda self, x: x * 3.4e38, x=X)
right("infinite constant", lambda self, x: torch.minimum(x, torch.tensor(math.inf)), x=X)
right("not a number where negative", lambda self, x: torch.where(x < 0, math.nan, x), x=X)
right("denormal constant", lambda self, x: torch.where(x > 0, 1e-40, x) * 1e38, x=X)
right("sixteen million and one", lambda self, x: x + 16777217.0, x=X)
right("leaky with a tiny slope", lambda self, x: F.leaky_relu(x, 1e-9), x=X)
right("leaky with a slope of one", lambda self, x: F.leaky_relu(x, 0.999999), x=X)
right("elu with a tiny alpha", lambda self, x: F.elu(x, 1e-8), x=X)
right("softplus with beta", lambda self, x: F.softplus(x, beta=1e-3), x=X)
right("softplus with a threshold", lambda self, x: F.softplus(x, beta=2.0, threshold=1.0), x=X)
right("celu with alpha", lambda self, x: F.celu(x, 1e-2), x=X)
right("hardshrink", lambda self, x: F.hardshrink(x, 1e-9), x=X)
right("softshrink", lambda self, x: F.softshrink(x, 1e-9), x=X)
right("threshold", lambda self, x: F.threshold(x, 1e-9, -1e-9), x=X)
right(
    "addcmul",
    lambda self, x, y: torch.addcmul(x, x, y, value=1e-8) - x,
    x=X,
    y=normal(2, 8, seed=9),
)
right(
    "add with alpha",
    lambda self, x, y: torch.add(x * 0, y, alpha=1e-9),
    x=X,
    y=normal(2, 8, seed=9),
)
right("lerp by little", lambda self, x, y: torch.lerp(x * 0, y, 1e-9), x=X, y=normal(2, 8, seed=9))
right(
    "demodulation",
    lambda self, w, s: w * torch.rsqrt((w * s[:, None]).square().sum(-1, keepdim=True) + 1e-8),
    w=normal(3, 8, 4),
    s=normal(3, 4),
)
right(
    "total variation",
    lambda self, x: torch.sqrt((x[:, 1:] - x[:, :-1]).square() + 1e-12).sum(-1),
    x=X,
)
right("charbonnier", lambda self, x, y: torch.sqrt((x - y) ** 2 + 1e-9).mean(-1), x=X, y=X + 1e-5)
right(
    "inverse sigmoid",
    lambda self, x: torch.log(x.clamp(1e-5, 1 - 1e-5) / (1 - x.clamp(1e-5, 1 - 1e-5))),
    x=uniform(2, 8),
)
right("entropy", lambda self, x: -(x.softmax(-1) * (x.softmax(-1) + 1e-20).log()).sum(-1), x=X)
right("ratio to one", lambda self, x: x / (1 + 1e-7), x=X)


class Registered(nn.Module):
    """A small parameter is a weight, not noise."""

    shift: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((8,), 1e-6))
        self.register_buffer("shift", torch.full((8,), 1e-9))

    def forward(self, x: Tensor) -> Any:
        return x * self.scale + self.shift, x + self.shift


class NearOnes(nn.Module):
    """Weights near one, near zero, and near each other."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Parameter(torch.ones(8) + 2e-6)
        self.other = nn.Parameter(torch.ones(8) + 4e-6)
        self.zero = nn.Parameter(torch.full((8,), 5e-9))

    def forward(self, x: Tensor) -> Any:
        return x * self.one, x * self.other, x * self.zero, x * (self.one - self.other)


class LayerScale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.gamma = nn.Parameter(torch.full((8,), 1e-6))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gamma * self.inner(x)


class Identity(nn.Module):
    """A matrix that is nearly, but not, the identity."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(8) + 1e-7)

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight - x) * 1e6


right("small weights", Registered, x=X)
right("weights near one", NearOnes, x=X)
right("layer scale", LayerScale, x=X)
CASES.either("nearly the identity", Identity, x=X)
