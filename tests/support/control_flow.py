"""Small modules with every kind of Python control flow that captures stumble over.

Each row has two inputs that take different paths through the module, or differ in size.  The line
that decides is marked `# HERE` in the source, so tests compare lines without counting them.
"""

import functools
import inspect
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

SIZE = 4
MARK = "# HERE"


class IfElse(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:  # HERE
            y = x + 1
        else:
            y = x - 2
            y = y / 2
        return y * 3


class EarlyReturn(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.mean() > 0:  # HERE
            return x * 2
        return x.abs() + 1


class IfWithoutElse(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.min() < 0:  # HERE
            x = x - x.min()
        return x.sqrt()


class Ternary(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x * 2 if x.max().item() > 1 else x - 1  # HERE
        return y + 1


class InfClamp(nn.Module):
    """What T5 did before it clamped always."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 2, SIZE))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale
        if torch.isinf(x).any() or x.max() < 0:  # HERE
            x = torch.clamp(x, min=-0.5, max=0.5)
        return x + 1


class WhileNorm(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        while x.norm() > 1:  # HERE
            x = x * 0.5
        return x + 1


class ForRangeTensor(nn.Module):
    def forward(self, x: Tensor, n: Tensor) -> Tensor:
        for i in range(int(n)):  # HERE
            x = x * 1.5 + i
        return x


class ForShape(nn.Module):
    """A recurrence over the rows, of which a trace unrolls as many as it saw: without a word."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.Linear(SIZE, SIZE)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.zeros(SIZE)
        for t in range(x.shape[0]):  # HERE
            h = torch.tanh(self.cell(x[t]) + h)
        return h


class AppendStack(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        rows = []
        total = torch.zeros(SIZE)
        for t in range(x.shape[0]):  # HERE
            total = total + x[t]
            rows.append(total)
        return torch.stack(rows)


class EarlyExit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(SIZE, SIZE) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x)) + x
            if x.abs().mean() > 1:  # HERE
                break
        return x


class SliceByItem(nn.Module):
    def forward(self, x: Tensor, n: Tensor) -> Tensor:
        return x[:, : n.item()] * 2  # HERE


class SliceByMax(nn.Module):
    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        return x[:, : lengths.max()] * 2  # HERE


class MaskIndex(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[x > 0] * 2  # HERE


class NonzeroCount(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.nonzero(x > 0).shape[0]  # HERE


class ArgmaxPool(nn.Module):
    """How CLIP finds the end of a text: data that indexes, and decides nothing."""

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return x[torch.arange(x.shape[0]), ids.argmax(dim=-1)]


class MoeLoop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(SIZE, 3)
        self.experts = nn.ModuleList(nn.Linear(SIZE, SIZE) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        chosen = self.router(x).argmax(dim=-1)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows = torch.where(chosen == index)[0]
            if rows.numel() > 0:  # HERE
                out.index_add_(0, rows, expert(x[rows]))
        return out


class TryValue(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        try:
            scale = 1 / int(x.sum() > 0)  # HERE
        except ZeroDivisionError:
            scale = 0.5
        return x * scale


class AssertValue(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        assert x.max() < 100, "too large"  # HERE
        return x + 1


class ToList(nn.Module):
    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        parts = torch.split(x, lengths.tolist(), dim=0)  # HERE
        return torch.stack([part.sum(dim=0) for part in parts])


class NumpyHop(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        scale = float(x.detach().numpy().max())  # HERE
        return x * scale


class PrintItem(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        print("mean", x.mean().item())  # HERE
        return x * 2


class IfShape(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] > 5:  # HERE
            return x * 2
        return x - 1


class IfDtype(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == torch.float16:  # HERE
            x = torch.clamp(x, -100, 100)
        return x * 2


class DictOutput(nn.Module):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"double": x * 2, "half": x / 2}


class _Clip(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clamp(-1, 1)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0]


class OwnFunction(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return _Clip.apply(x * 2)  # type: ignore[no-untyped-call]


class BufferCounter(nn.Module):
    n: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("n", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.n += 1  # HERE
        return x * self.n


class KvCache(nn.Module):
    cache: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", torch.zeros(8, SIZE))

    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        self.cache.index_copy_(0, position, x)  # HERE
        return self.cache.sum(dim=0)


class PythonCounter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1  # HERE
        return x * self.calls


class InPlaceOnClone(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x.clone()
        y[:, 0] = 0
        return y.mul_(2)


class Noise(nn.Module):
    """Not random in the end: the noise is multiplied by zero."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.rand_like(x) * 0


def deprecated(function: Callable[..., Any]) -> Callable[..., Any]:
    """What mmengine wraps around every attention: it inspects and may warn."""

    @functools.wraps(function)
    def new_func(*args: Any, **kwargs: Any) -> Any:
        names = inspect.getfullargspec(function).args
        if "old" in kwargs and "old" not in names:
            warnings.warn("old is deprecated", stacklevel=2)
        return function(*args, **kwargs)

    return new_func


class Decorated(nn.Module):
    @deprecated
    def forward(self, x: Tensor) -> Tensor:
        return x * 2


@dataclass(frozen=True)
class Row:
    """One module with what is known about it."""

    make: Callable[[], nn.Module]
    a: Callable[[], dict[str, Tensor]]
    """The example input."""
    b: Callable[[], dict[str, Tensor]]
    """Takes the other path, or has another size."""
    kind: str
    """What decides, in the words of a finding; empty: nothing does."""
    decides: str = "inputs"
    is_branch: bool = False
    """One of those with a real branch or loop, of which both paths must be right."""

    @property
    def name(self) -> str:
        return self.make.__name__

    @property
    def file(self) -> str:
        return inspect.getsourcefile(inspect.unwrap(self.make)) or ""

    @property
    def line(self) -> int:
        """Of the line that is marked; 0 when none is."""
        lines, first = inspect.getsourcelines(self.make)
        return next((first + i for i, text in enumerate(lines) if MARK in text), 0)

    def module(self) -> nn.Module:
        torch.manual_seed(0)
        return self.make().eval()


def _x(rows: int, scale: float = 1.0, shift: float = 0.0) -> Tensor:
    generator = torch.Generator().manual_seed(rows)
    return torch.rand(rows, SIZE, generator=generator) * scale + shift


def _only(x: Tensor) -> Callable[[], dict[str, Tensor]]:
    return lambda: {"x": x.clone()}


def _with(name: str, x: Tensor, other: Any) -> Callable[[], dict[str, Tensor]]:
    return lambda: {"x": x.clone(), name: torch.tensor(other)}


POSITIVE, NEGATIVE = _only(_x(3, 1.0, 0.1)), _only(_x(3, 1.0, -2.0))
SMALL, LARGE = _only(_x(3, 0.1)), _only(_x(5, 20.0))
THREE, SEVEN = _only(_x(3)), _only(_x(7))

ROWS = (
    Row(IfElse, POSITIVE, NEGATIVE, "if", is_branch=True),
    Row(EarlyReturn, POSITIVE, NEGATIVE, "if", is_branch=True),
    Row(IfWithoutElse, POSITIVE, NEGATIVE, "if", is_branch=True),
    Row(Ternary, SMALL, LARGE, "ternary", is_branch=True),
    Row(InfClamp, POSITIVE, NEGATIVE, "if", is_branch=True),
    Row(WhileNorm, SMALL, LARGE, "while", is_branch=True),
    Row(ForRangeTensor, _with("n", _x(3), 5), _with("n", _x(3), 2), "for", is_branch=True),
    Row(ForShape, THREE, SEVEN, "for", "shapes", is_branch=True),
    Row(AppendStack, THREE, SEVEN, "for", "shapes", is_branch=True),
    Row(EarlyExit, SMALL, LARGE, "if", is_branch=True),
    Row(MoeLoop, THREE, SEVEN, "if", is_branch=True),
    Row(SliceByItem, _with("n", _x(3), 2), _with("n", _x(3), 3), "item"),
    Row(SliceByMax, _with("lengths", _x(3), [1, 2]), _with("lengths", _x(3), [3, 1]), "index"),
    Row(MaskIndex, POSITIVE, _only(_x(3, 2.0, -1.0)), "mask-index"),
    Row(NonzeroCount, POSITIVE, _only(_x(3, 2.0, -1.0)), "nonzero"),
    Row(
        ArgmaxPool,
        lambda: {"x": _x(20).reshape(2, 10, SIZE), "ids": torch.arange(20).reshape(2, 10) % 7},
        lambda: {"x": _x(30).reshape(3, 10, SIZE), "ids": torch.arange(30).reshape(3, 10) % 8},
        "",
    ),
    Row(TryValue, POSITIVE, NEGATIVE, "try"),
    Row(AssertValue, POSITIVE, NEGATIVE, "assert"),
    Row(ToList, _with("lengths", _x(5), [2, 3]), _with("lengths", _x(5), [1, 4]), "tolist"),
    Row(NumpyHop, POSITIVE, LARGE, "numpy"),
    Row(PrintItem, POSITIVE, NEGATIVE, "print"),
    Row(IfShape, THREE, SEVEN, "if", "shapes"),
    Row(IfDtype, THREE, SEVEN, "if", "dtypes"),
    Row(DictOutput, THREE, SEVEN, ""),
    Row(OwnFunction, THREE, SEVEN, ""),
    Row(BufferCounter, THREE, SEVEN, "state", "state"),
    Row(
        KvCache,
        lambda: {"x": _x(2), "position": torch.tensor([0, 1])},
        lambda: {"x": _x(3), "position": torch.tensor([2, 3, 4])},
        "state",
        "state",
    ),
    Row(PythonCounter, THREE, SEVEN, "state", "state"),
    Row(InPlaceOnClone, THREE, SEVEN, ""),
    Row(Noise, THREE, SEVEN, ""),
    Row(Decorated, THREE, SEVEN, ""),
)
BRANCHES = tuple(row for row in ROWS if row.is_branch)
