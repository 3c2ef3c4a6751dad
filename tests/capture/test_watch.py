"""What calls change outside of tensors and plain attributes."""

import array
import functools
import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from enginecast.capture.tracing.state.watched_names import Watch

COUNTS, TALLY, RECENT = np.zeros(2), array.array("l", [0]), deque([0], 3)
TICKS, SPACE, LOCAL = itertools.count(), SimpleNamespace(n=0), threading.local()
LOCAL.n = 0


class Counts:
    n = 0

    def step(self) -> None:
        self.n += 1


class Slotted:
    __slots__ = ("n",)

    def __init__(self) -> None:
        self.n = 0


def numbers() -> Iterator[int]:
    n = 0
    while True:
        yield (n := n + 1)


SLOTS, NUMBERS, TURNS = Slotted(), numbers(), iter(range(9))
DEEP = SimpleNamespace(config={"steps": SimpleNamespace(done=[0])})
APPENDS, STEP = functools.partial(list.append, []), Counts().step


@functools.cache
def seen() -> list[int]:
    return []


@functools.lru_cache(maxsize=2)
def factor(size: int) -> Tensor:
    return torch.arange(float(size))


def helper() -> None:
    helper.calls = getattr(helper, "calls", 0) + 1  # type: ignore[attr-defined]


HELPERS = (helper, factor)


class Calls(nn.Module):
    """Does something at every call."""

    def __init__(self, act: Callable[[], object]) -> None:
        super().__init__()
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        self.act()
        return x


ACTS: dict[str, Callable[[], object]] = {
    "seen": lambda: seen().append(0),
    "COUNTS": lambda: COUNTS.__setitem__(0, COUNTS[0] + 1),
    "TALLY": lambda: TALLY.__setitem__(0, TALLY[0] + 1),
    "RECENT": lambda: RECENT.append(RECENT[-1] + 1),
    "TICKS": lambda: next(TICKS),
    "SPACE": lambda: setattr(SPACE, "n", SPACE.n + 1),
    "LOCAL": lambda: setattr(LOCAL, "n", LOCAL.n + 1),
    "Counts": lambda: setattr(Counts, "n", Counts.n + 1),
    "SLOTS": lambda: setattr(SLOTS, "n", SLOTS.n + 1),
    "NUMBERS": lambda: next(NUMBERS),
    "TURNS": lambda: next(TURNS),
    "DEEP": lambda: DEEP.config["steps"].done.append(0),
    "APPENDS": lambda: APPENDS(0),
    "STEP": lambda: STEP(),
    "helper": helper,
    "": lambda: (factor(3), factor(4), COUNTS.sum(), len(HELPERS)),
}


@pytest.mark.parametrize("name", ACTS)
def test_what_calls_change_is_seen(name: str) -> None:
    module = Calls(ACTS[name])
    watch = Watch(module)
    with watch.following():
        module(torch.ones(1))
    watch.look()
    factor.cache_clear()
    module(torch.ones(1))
    found = {change.name for change in watch.changes()}
    assert name in found if name else not found
