"""Modules that remember: in attributes, globals, closures, caches."""

import functools
import itertools
from collections import Counter, deque
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from adversary.case import Group, normal

CASES = Group("state", "state that equal inputs do not show")
refused, either, right = CASES.refused, CASES.either, CASES.right
X = normal(2, 8)
CALLS = 0
SEEN: list[float] = []
LAST: dict[str, Tensor] = {}


class Smoothed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        out = x if self.last is None else 0.6 * x + 0.4 * self.last
        self.last = out.detach()
        return out


class SmoothedBuffer(nn.Module):
    last: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("last", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        out = 0.6 * x + 0.4 * self.last
        self.last.copy_(out.mean(0))
        return out


class Assigned(nn.Module):
    last: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("last", torch.zeros(8), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        out = x + self.last
        self.last = x.mean(0)
        return out


class Counted(nn.Module):
    """Warms up for `calls` calls."""

    def __init__(self, calls: int = 25) -> None:
        super().__init__()
        self.calls, self.n = calls, 0

    def forward(self, x: Tensor) -> Tensor:
        self.n += 1
        return x * 2 if self.n < self.calls else x * 3


class CountedBuffer(nn.Module):
    n: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("n", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.n += 1
        return x / self.n


class Listed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x.mean().detach())
        return x * len(self.seen)


class Queued(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.recent: deque[Tensor] = deque(maxlen=3)

    def forward(self, x: Tensor) -> Tensor:
        self.recent.append(x.detach().clone())
        return torch.stack([item.mean() for item in self.recent]).mean() + x


class Remembered(nn.Module):
    """Keeps what it made for the first input, and reuses it for later ones."""

    def __init__(self) -> None:
        super().__init__()
        self.made: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.made is None:
            self.made = x.mean(0, keepdim=True).detach()
        return x - self.made


class Iterated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factors = itertools.cycle([1.0, 2.0, 3.0])

    def forward(self, x: Tensor) -> Tensor:
        return x * next(self.factors)


class ClassState(nn.Module):
    calls: ClassVar[list[int]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.calls.append(1)
        return x * (1 if len(self.calls) < 40 else 2)


class Hooked(nn.Module):
    """A hook counts."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.count = 0
        self.inner.register_forward_hook(self.tally)

    def tally(self, module: nn.Module, given: Any, result: Tensor) -> Tensor:
        self.count += 1
        return result * self.count

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.inner(x)
        return result


class Diagnosed(nn.Module):
    """It remembers what nothing reads: right to publish."""

    def __init__(self) -> None:
        super().__init__()
        self.shape: tuple[int, ...] = ()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.shape = tuple(x.shape)
        self.calls += 1
        return x.tanh()


class KeptWeights(nn.Module):
    """Its own cache of its weights: the same at every call."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.normed: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.normed is None:
            self.normed = (self.weight / self.weight.norm(dim=0)).detach()
        return x @ self.normed


class Momentum(nn.Module):
    """A batch norm in train mode that keeps statistics, on request."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.norm(x)
        return result


def counted_global(self: nn.Module, x: Tensor) -> Tensor:
    global CALLS
    CALLS += 1
    return x * 2 if CALLS < 30 else x * 3


def listed_global(self: nn.Module, x: Tensor) -> Tensor:
    SEEN.append(1.0)
    return x + sum(SEEN)


def kept_global(self: nn.Module, x: Tensor) -> Tensor:
    last = LAST.get("x", torch.zeros(8))
    LAST["x"] = x.mean(0)
    return x + last


def closure() -> Callable[..., Tensor]:
    count = 0

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        nonlocal count
        count += 1
        return x * min(count, 60)

    return forward


def default(self: nn.Module, x: Tensor, seen: Any = None) -> Tensor:
    kept = _kept()
    kept.append(0)
    return x * (1 + len(kept) // 50)


@functools.cache
def _kept() -> list[int]:
    return []


@functools.lru_cache
def _factor(size: int) -> Tensor:
    return torch.arange(float(size)) + 1


def _evaluated(made: type[nn.Module]) -> nn.Module:
    return made().eval()


refused("smoothed", Smoothed, x=X, is_quick=True)
refused("smoothed in a buffer", SmoothedBuffer, x=X)
refused("buffer assigned", Assigned, x=X)
refused("counts to 25", Counted, x=X)
refused("counts to two", functools.partial(Counted, 2), x=X)
either("counts to a million", functools.partial(Counted, 1_000_000), x=X)
refused("counts in a buffer", CountedBuffer, x=X)
refused("list that grows", Listed, x=X)
refused("queue", Queued, x=X)
refused("first input kept", Remembered, x=X)
refused("iterator", Iterated, x=X)
refused("list of the class", ClassState, x=X)
refused("hook that counts", Hooked, x=X)
right("diagnosed", Diagnosed, x=X)
right("weights kept", KeptWeights, x=X)
right("batch norm in eval", functools.partial(_evaluated, Momentum), x=X)
refused("counter in a global", counted_global, x=X)
refused("list in a global", listed_global, x=X)
refused("tensor in a global", kept_global, x=X)
refused("counter in a closure", closure(), x=X)
refused("list behind a cache", lambda self, x: default(self, x), x=X)
right("cached tensor", lambda self, x: x * _factor(8), x=X)


class Counts:
    n = 0

    def step(self) -> float:
        self.n += 1
        return 1.0 if self.n < LATE else 2.0


class Slotted:
    __slots__ = ("n",)

    def __init__(self) -> None:
        self.n = 0


class Holds:
    def __init__(self) -> None:
        self.config = {"warm": {"steps": [0]}}


LATE = 60
"""Calls after which another result comes: more than are made while a model is compared."""
SLOTTED, HOLDS, TALLY = Slotted(), Holds(), Counter[str]()


def numbers() -> Iterator[float]:
    for n in range(10**6):
        yield 1.0 if n < LATE else 2.0


NUMBERS, TURNS = numbers(), iter(range(10**6))


def by_class() -> float:
    Counts.n += 1
    return 1.0 if Counts.n < LATE else 2.0


def by_slots() -> float:
    SLOTTED.n += 1
    return 1.0 if SLOTTED.n < LATE else 2.0


def by_depth() -> float:
    steps = HOLDS.config["warm"]["steps"]
    steps[0] += 1
    return 1.0 if steps[0] < LATE else 2.0


def by_tally() -> float:
    TALLY["calls"] += 1
    return 1.0 if TALLY["calls"] < LATE else 2.0


def grown(seen: list[int]) -> float:
    seen.append(0)
    return 1.0 if len(seen) < LATE else 2.0


class Asks(nn.Module):
    """Times what somebody else keeps."""

    def __init__(self, factor: Callable[[], float]) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor()


KEPT: dict[str, Callable[[], Callable[[], float]]] = {
    "an attribute of a class": lambda: by_class,
    "slots": lambda: by_slots,
    "a list in a dict of an object": lambda: by_depth,
    "a Counter": lambda: by_tally,
    "what a method is bound to": lambda: Counts().step,
    "an argument of a partial": lambda: functools.partial(grown, []),
    "a generator": lambda: lambda: next(NUMBERS),
    "an iterator": lambda: lambda: 1.0 if next(TURNS) < LATE else 2.0,
}
for name, make in KEPT.items():
    refused(f"kept in {name}", functools.partial(Asks, make()), x=X)
