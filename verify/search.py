"""Finds what does harm among many things that can each be left out: bisection, again and again."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

Item = TypeVar("Item")
Good = Callable[[Sequence[Item]], bool]
"""Whether these items together do no harm."""


@dataclass(frozen=True)
class Found(Generic[Item]):
    """What a search ended in; the three parts are all of the items."""

    kept: tuple[Item, ...]
    """Do no harm together: that was tried."""
    guilty: tuple[Item, ...]
    """Each does harm beside those that were kept when it was found."""
    undecided: tuple[Item, ...]
    """Left out too, because there was no budget to tell them apart."""


def budget_for(count: int) -> int:
    """Trials that a search among `count` items may take: enough for about three guilty ones."""
    return 4 + 4 * math.ceil(math.log2(count + 1))


def search(items: Sequence[Item], good: Good[Item], budget: int | None = None) -> Found[Item]:
    """Leave out as few items as repeated bisection can tell apart.

    Each round finds the shortest harmful prefix of what is left and takes its last item out, so it
    ends whatever the items do to each other: of two that only do harm together, the later goes.

    Args:
        items: known to do harm together; none of them does none.
        good: is asked about items in their order.
        budget: the most trials; None: `budget_for`.
    """
    left = budget_for(len(items)) if budget is None else budget
    kept: tuple[Item, ...] = ()
    guilty: list[Item] = []
    rest = tuple(items)
    harmful = True
    while rest:
        if not harmful:
            if left <= 0:
                return Found(kept, tuple(guilty), rest)
            left -= 1
            if good((*kept, *rest)):
                return Found((*kept, *rest), tuple(guilty), ())
        fine, wrong = 0, len(rest)
        while wrong - fine > 1:
            if left <= 0:
                return Found((*kept, *rest[:fine]), tuple(guilty), rest[fine:])
            left -= 1
            middle = (fine + wrong) // 2
            if good((*kept, *rest[:middle])):
                fine = middle
            else:
                wrong = middle
        guilty.append(rest[fine])
        kept, rest, harmful = (*kept, *rest[:fine]), rest[fine + 1 :], False
    return Found(kept, tuple(guilty), ())


def first_wrong(count: int, wrong: Callable[[int], bool]) -> int:
    """The first of `count` steps after which things are wrong, by bisection.

    Args:
        count: after the last of them things are wrong, before the first they are not.
    """
    fine, bad = -1, count - 1
    while bad - fine > 1:
        middle = (fine + bad) // 2
        if wrong(middle):
            bad = middle
        else:
            fine = middle
    return bad
