"""Branches and reads of values: what is baked must not be published."""

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from adversary.case import Group, marks, normal, whole

CASES = Group("values", "branches and loops on values, numbers read from tensors")
either, right = CASES.either, CASES.right
X = normal(2, 8)


class Branch(nn.Module):
    def __init__(self, predicate: Any) -> None:
        super().__init__()
        self.predicate = predicate

    def forward(self, x: Tensor) -> Tensor:
        if self.predicate(x):
            return x * 3
        return x * 2 + 1


PREDICATES = {
    "sum is positive": lambda x: x.sum() > 0,
    "peak in numpy": lambda x: x.numpy().max() > 8.0,
    "sum is never": lambda x: x.sum() > 1e30,
    "any negative": lambda x: bool((x < 0).any()),
    "item": lambda x: x[0, 0].item() > 0.5,
    "list": lambda x: x.tolist()[0][0] > 0.5,
    "all equal": lambda x: torch.equal(x, x.flip(0)),
    "close to zero": lambda x: torch.allclose(x, torch.zeros_like(x)),
    "not finite": lambda x: not torch.isfinite(x).all(),
    "count of nonzero": lambda x: torch.count_nonzero(x) > 14,
    "length of nonzero": lambda x: len(torch.nonzero(x > 1)) > 3,
    "argmax is three": lambda x: int(x[0].argmax()) == 3,
    "text of a value": lambda x: str(float(x[0, 0]))[0] == "-",
    "mean by numpy": lambda x: np.mean(np.asarray(x)) > 0.25,
    "and of two": lambda x: x.sum() > 0 and x.max() > 1,
    "number of distinct": lambda x: x.round().unique().numel() > 5,
    "is nonzero": lambda x: torch.is_nonzero(x[0, 0] > 0),
    "format": lambda x: f"{float(x.max()):.0f}" == "2",
}
for name, predicate in PREDICATES.items():
    either(name, partial(Branch, predicate), x=X, is_quick=name in ("item", "peak in numpy"))
    either(f"{name} in torchscript", partial(Branch, predicate), x=X, target="torchscript")


class Peak(nn.Module):
    """The read is a line before the branch."""

    def forward(self, x: Tensor) -> Tensor:
        samples = x.numpy()
        peak = np.abs(samples).max()
        if peak > 8.0:
            x = x / 8.0
        return x


class Helper(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return _limited(x, _peak(x))


def _peak(x: Tensor) -> float:
    return float(x.abs().max())


def _limited(x: Tensor, peak: float) -> Tensor:
    return x / peak if peak > 3.0 else x


class Loop(nn.Module):
    """As often as a value says."""

    def forward(self, x: Tensor, n: Tensor) -> Tensor:
        for _ in range(int(n)):
            x = x * 0.5 + 1
        return x


class While(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        while x.abs().max() > 1:
            x = x * 0.5
        return x


class Early(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            if x.mean() > 0.1:
                return x
        return -x


class Experts(nn.Module):
    """Each row to the expert that its own values choose."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 3)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        chosen = self.gate(x).argmax(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = torch.where(chosen == number)[0]
            if rows.numel():
                out[rows] = expert(x[rows])
        return out


class Guarded(nn.Module):
    """An error on bad values; otherwise plain."""

    def forward(self, x: Tensor) -> Tensor:
        if torch.isnan(x).any():
            raise ValueError("not a number")
        return x * 2


class Asserted(nn.Module):
    def forward(self, i: Tensor) -> Tensor:
        torch._assert_async((i >= 0).all())
        return i * 2


class Sliced(nn.Module):
    """Values decide sizes."""

    def forward(self, x: Tensor, n: Tensor) -> Tensor:
        return x[:, : int(n.max())].sum(-1)


either("peak a line before", Peak, x=X)
either("peak a line before in torchscript", Peak, x=X, target="torchscript")
either("in helpers", Helper, x=X)
either("in helpers in torchscript", Helper, x=X, target="torchscript")
either("loop by a value", Loop, x=X, n=torch.tensor(3))
either("loop by a value in torchscript", Loop, x=X, n=torch.tensor(3), target="torchscript")
either("while", While, x=X)
either("early exit", Early, x=X)
either("experts", Experts, x=normal(6, 8))
either("error on bad values", Guarded, x=X)
either("assertion", Asserted, i=whole(2, 4))
either("slice by a value", Sliced, x=X, n=whole(2, low=1, high=5))
either(
    "slice by a value in torchscript", Sliced, x=X, n=whole(2, low=1, high=5), target="torchscript"
)
FORWARDS = {
    "factor read": lambda self, x: x * x.max().item(),
    "factor from a list": lambda self, x: x * sum(x.flatten().tolist()),
    "rounded factor": lambda self, x: x * round(float(x.mean()), 1),
    "integer factor": lambda self, x: x * int(x.sum()),
    "index read": lambda self, x: x[:, int(x[0].argmax())],
    "tensor from numbers": lambda self, x: torch.tensor([float(v) for v in x[0]]) + x,
    "through numpy": lambda self, x: torch.from_numpy(np.sort(x.numpy(), -1)),
    "through numpy and back": lambda self, x: x + torch.as_tensor(np.cumsum(np.asarray(x), -1)),
    "maximum of python": lambda self, x: x * max(float(x[0, 0]), 0.5),
    "sorted by python": lambda self, x: torch.stack(sorted(x, key=lambda row: float(row.sum()))),
    "quantile read": lambda self, x: x.clamp(max=float(x.quantile(0.9))),
    "ternary in a lambda": lambda self, x: (lambda y: y * 2 if y.sum() > 0 else y * 3)(x),
    "comprehension with a condition": lambda self, x: torch.stack([r for r in x if r.sum() > -100]),
    "or of tensors": lambda self, x: x * 2 if (x.min() > 0 or x.max() < 0) else x,
    "chained comparison": lambda self, x: x * 2 if 0 < x.mean() < 1 else x - 1,
    "value as a size": lambda self, x: torch.zeros(int(x.abs().sum())),
    "value as a step": lambda self, x: torch.arange(0, 10, float(x.abs().max()) + 1),
    "match": lambda self, x: {True: x * 2, False: x * 3}[bool(x.sum() > 0)],
    "min of two numbers": lambda self, x: x / min(float(x.max()), 2.0),
    "negative index read": lambda self, x: x[:, -(int(x.abs().max()) % 4 + 1)],
}
for name, forward in FORWARDS.items():
    either(name, forward, x=X)
    if name in ("factor read", "integer factor", "through numpy", "rounded factor", "index read"):
        either(f"{name} in torchscript", forward, x=X, target="torchscript")
right("nonzero", lambda self, x: torch.nonzero(x > 0), x=X)
right("selected by a mask", lambda self, x, m: x[m], x=X, m=marks(2, 8))
right("branch without a branch", lambda self, x: torch.where(x.sum() > 0, x * 3, x * 2), x=X)
either("unique", lambda self, x: x.round().unique(), x=X)
either(
    "torch cond",
    lambda self, x: torch.cond(x.sum() > 0, lambda y: y * 2, lambda y: y * 3, (x,)),
    x=X,
)
either(
    "cond that is rare",
    lambda self, x: torch.cond(x.sum() > 100000, lambda y: y * 2, lambda y: y * 3, (x,)),
    x=X,
)
either(
    "interleaved repeats",
    lambda self, x, n: x.repeat_interleave(n, 1),
    x=normal(2, 4),
    n=whole(4, low=1, high=4),
)
either("bincount", lambda self, i: torch.bincount(i, minlength=5), i=whole(6, high=5))
either("in train mode alone", lambda self, x: x * 2 if not self.training or x.sum() > 0 else x, x=X)
