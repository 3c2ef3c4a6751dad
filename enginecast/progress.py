"""How far long loops are: `counted` tells whoever listens, such as a command on a terminal.

It is ambient, as a log is: what runs a loop need not hand anything on to what shows it.
"""

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TypeVar

T = TypeVar("T")


@dataclass(eq=False)
class Loop:
    """A loop that runs."""

    what: str
    """What is counted, in the plural: "cases"."""
    total: int
    done: int = 0
    start: float = field(default_factory=time.monotonic)
    round: float = field(default_factory=time.monotonic)
    """When the round began that runs."""

    @property
    def left(self) -> float | None:
        """Seconds until its end, if all rounds take as long as those so far; None: not known."""
        if not self.done:
            return None
        return (time.monotonic() - self.start) / self.done * (self.total - self.done)


Tell = Callable[[Sequence[Loop]], None]
_listener: ContextVar[tuple[Tell, list[Loop]] | None] = ContextVar("listener", default=None)


@contextmanager
def listening(tell: Tell) -> Iterator[None]:
    """Within the block, call `tell` before each round with the loops that run, the outermost
    first.
    """
    token = _listener.set((tell, []))
    try:
        yield
    finally:
        _listener.reset(token)


def counted(items: Collection[T], what: str) -> Iterator[T]:
    """The items, one by one."""
    heard = _listener.get()
    if heard is None or len(items) < 2:
        yield from items
        return
    (tell, loops), loop = heard, Loop(what, len(items))
    loops.append(loop)
    try:
        for item in items:
            loop.round = time.monotonic()
            tell(loops)
            yield item
            loop.done += 1
    finally:
        loops.remove(loop)
