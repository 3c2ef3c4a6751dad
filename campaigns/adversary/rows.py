"""Outputs whose elements differ in size: what one norm over all of them hides."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from adversary.case import Group, marks, normal, whole

CASES = Group("rows", "small values beside large ones, integers, masks by chance")
right, either = CASES.right, CASES.either
X = normal(3, 6, 8)


class Detector(nn.Module):
    """Boxes of some millions beside a confidence, and scores of classes."""

    def __init__(self, scale: float = 5e6) -> None:
        super().__init__()
        self.box, self.head, self.scale = nn.Linear(8, 4), nn.Linear(8, 3), scale

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.box(x) * self.scale, self.head(x).sigmoid()], -1)


class Outlier(nn.Module):
    """One token a thousand times as large as the others."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.b(F.gelu(self.a(x)))
        return torch.cat([h[:, :1] * 1000, h[:, 1:]], 1)


class Labels(nn.Module):
    """Integers that are counted in the thousands, and a decision."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor, i: Tensor) -> Any:
        return self.head(x).argmax(-1), i + 10_000_000_000, i * 2 + 1


class Square(nn.Module):
    """A static length that equals the width of what goes out: no mask follows from that."""

    def forward(self, x: Tensor, m: Tensor) -> Tensor:
        return x.mean(1) * 2 + m.float().cumsum(-1) * 0.5


class Mixed(nn.Module):
    """Several outputs of very different sizes, one of them zero nearly everywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Any:
        h = self.inner(x)
        return {"large": h * 1e12, "small": h * 1e-12, "rare": (h - 1.2).relu(), "sum": h.sum()}


class Channels(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.logspace(-6, 6, 8))
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x).tanh() * self.scale
        return out


for scale in (5e6, 1e9):
    right(f"boxes of {scale:g}", partial(Detector, scale), x=X)
right("outlier token", Outlier, x=X)
either("outlier token in int8", Outlier, x=X, precision="int8")
either("boxes in fp16", Detector, x=X, precision="fp16")
either("boxes in int8", Detector, x=X, precision="int8")
either("labels in int8", Labels, x=normal(3, 64, 8), i=whole(3, 4), precision="int8")
right("labels", Labels, x=X, i=whole(3, 4))
right("labels in fp16", Labels, x=X, i=whole(3, 4), precision="fp16")
right("length equals width", Square, x=normal(3, 8, 8), m=marks(3, 8))
right("outputs of many sizes", Mixed, x=X)
right("channels of many sizes", Channels, x=X)
right("small beside large", lambda self, x: torch.cat([x * 1e10, x * 1e-10], -1), x=X)
right("one small row", lambda self, x: x * torch.tensor([1e9, 1e-3, 1, 1, 1e-9, 1])[:, None], x=X)
right(
    "integers and floats",
    lambda self, x, i: (x.exp(), i * i, x > 0, x.argsort(-1)),
    x=X,
    i=whole(3, 4),
)
right("ids plus many", lambda self, i: i + 2**40, i=whole(3, 4))
right("decisions by a threshold", lambda self, x: (x.mean(-1) > 0, x.mean(-1)), x=X)
right("counts", lambda self, x: (x > 0).sum(-1), x=X)
right("counts in fp16", lambda self, x: (x > 0).sum((1, 2)), x=normal(2, 60, 60), precision="fp16")
right(
    "ids through fp16",
    lambda self, x, i: (x * 2, i * 3 + 1),
    x=X,
    i=whole(3, 4, high=5000),
    precision="fp16",
)
right(
    "positions through fp16",
    lambda self, x: x + torch.arange(x.shape[1])[:, None] / 7,
    x=normal(2, 40, 8),
    precision="fp16",
)
either("long sum in fp16", lambda self, x: x.abs().sum(-1), x=normal(2, 4000), precision="fp16")
either("squares in fp16", lambda self, x: (x * 300).square().mean(-1).sqrt(), x=X, precision="fp16")
either("outlier token in bf16", Outlier, x=X, precision="bf16")
right("logits and probabilities", lambda self, x: (x * 100, (x * 100).softmax(-1)), x=X)
right(
    "mask as an output", lambda self, x, m: (x.masked_fill(~m[..., None], 0), m), x=X, m=marks(3, 6)
)
right(
    "padded rows", lambda self, x, m: x * m[..., None] + (~m[..., None]) * 1e6, x=X, m=marks(3, 6)
)
