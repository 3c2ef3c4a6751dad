"""Facts about a value, for each row of tokens, when padding is cut off."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

Interval = tuple[float, float] | None
"""Bounds, both inclusive; None: numbers as a model computes them, smaller than `ORDINARY`."""
Side = Literal["right", "any"]
"""Where padding is: after the valid tokens of each row, or anywhere."""

ORDINARY = 1e8
"""No score of attention, and nothing else that a model computes, is larger."""
SMALL = 1e6
"""Numbers that keep what they are added to, or multiplied by, ordinary."""
NEGLIGIBLE = -5e8
"""exp of this, beside that of an ordinary number, is zero in every dtype."""
ANYTHING = (-math.inf, math.inf)
ZERO, ONE = (0.0, 0.0), (1.0, 1.0)


class Unproved(Exception):  # noqa: N818 - it is a result, and never leaves the analysis
    """A value is not known to be the same without the padding; says why."""


@dataclass(frozen=True)
class Fact:
    """A value that is the same, wherever its tokens are valid, when padding is cut off.

    A dimension of tokens has an index for each column of the mask.  A token is valid where the mask
    of its own row of the batch is not zero.
    """

    labels: tuple[str, ...]
    """For each dimension "t" (tokens), "b" (batch), "bt" (both, flattened), or "" (neither)."""
    here: Interval = None
    """Where all tokens are the same valid one."""
    pads: tuple[Interval, ...] = ()
    """For each dimension of tokens, in order: where that token is padding and the others, each
    the same one, are valid."""
    span: Interval = None
    """Everywhere."""
    steps: tuple[int, ...] | None = None
    """The value is the sum of each dimension's index times this, and `offset`; None: it is not."""
    offset: int = 0

    @property
    def moves(self) -> bool:
        """Whether it is a position, which is another one when columns on the left are cut off."""
        return self.steps is not None and sum(self.steps[dim] for dim in self.tokens) != 0

    @property
    def counts_rows(self) -> bool:
        """Whether it is a position in the batch, which is another one where rows run apart."""
        rows = zip(self.steps or (), self.labels, strict=False)
        return any(step and "b" in label for step, label in rows)

    @property
    def tokens(self) -> tuple[int, ...]:
        """The dimensions of tokens."""
        return tuple(dim for dim, label in enumerate(self.labels) if "t" in label)

    def pad(self, dim: int) -> Interval:
        """The value where the token of a dimension is padding."""
        return self.pads[self.tokens.index(dim)] if self.pads else self.span

    def index_along(self) -> int | None:
        """The dimension whose index the value is."""
        if self.steps is None or self.offset or sorted(self.steps)[-1:] != [1]:
            return None
        return self.steps.index(1) if sum(map(abs, self.steps)) == 1 else None


def position(
    labels: tuple[str, ...], steps: tuple[int, ...], offset: int, side: Side, longest: float
) -> Fact:
    """A sum of indices: what is known of it follows from where padding is.

    Args:
        longest: the largest number of tokens.
    """
    fact = Fact(labels, span=ANYTHING, here=ANYTHING, steps=steps, offset=offset)
    tokens = fact.tokens
    if any(step for dim, step in enumerate(steps) if dim not in tokens):
        return replace(fact, pads=(ANYTHING,) * len(tokens))
    reach = [s * longest for s in steps]
    low, high = (sum(bound(r, 0) for r in reach) + offset for bound in (min, max))
    span = float(low), float(high)
    here = (float(offset), float(offset)) if sum(steps) == 0 else span
    pads = tuple(_behind(steps, dim, offset, span) if side == "right" else span for dim in tokens)
    return replace(fact, here=here, pads=pads, span=span)


def _behind(
    steps: tuple[int, ...], dim: int, offset: int, span: tuple[float, float]
) -> tuple[float, float]:
    """The sum where the index of one dimension is greater than all others."""
    step = steps[dim]
    if sum(steps) != 0 or any(other * step > 0 for d, other in enumerate(steps) if d != dim):
        return span
    nearest = float(step + offset)
    return (nearest, max(nearest, span[1])) if step > 0 else (min(nearest, span[0]), nearest)


def is_small(interval: Interval) -> bool:
    """Whether ordinary numbers stay ordinary beside these."""
    return interval is None or (interval[0] >= -SMALL and interval[1] <= SMALL)


def hull(left: Interval, right: Interval) -> Interval:
    """One of the two."""
    if left == right or (None in (left, right) and is_small(left) and is_small(right)):
        return left if left == right else None
    (a, b), (c, d) = wide(left), wide(right)
    return min(a, c), max(b, d)


def wide(interval: Interval) -> tuple[float, float]:
    """The bounds of numbers, ordinary ones too."""
    return (-ORDINARY, ORDINARY) if interval is None else interval


def plus(left: Interval, right: Interval) -> Interval:
    if None in (left, right) and is_small(left) and is_small(right):
        return None
    (a, b), (c, d) = wide(left), wide(right)
    return _checked(a + c, b + d)


def times(left: Interval, right: Interval) -> Interval:
    if ZERO in (left, right) and all(map(math.isfinite, (*wide(left), *wide(right)))):
        return ZERO
    if None in (left, right) and is_small(left) and is_small(right):
        return None
    found = [x * y for x in wide(left) for y in wide(right)]
    return _checked(min(found), max(found)) if not any(map(math.isnan, found)) else ANYTHING


def negative(one: Interval) -> Interval:
    return None if one is None else (-one[1], -one[0])


def over(left: Interval, right: Interval) -> Interval:
    if right is None:
        return ZERO if left == ZERO else None if is_small(left) else ANYTHING
    if right[0] <= 0 <= right[1]:
        return ANYTHING
    return times(left, (1 / right[1], 1 / right[0]))


def magnitude(one: Interval) -> Interval:
    if one is None:
        return None
    low, high = sorted((abs(one[0]), abs(one[1])))
    return (0.0 if one[0] <= 0 <= one[1] else low), high


def chosen(condition: Interval, yes: Interval, no: Interval) -> Interval:
    """`where`."""
    found = nonzero(condition)
    return yes if found == ONE else no if found == ZERO else hull(yes, no)


def nonzero(one: Interval) -> Interval:
    low, high = wide(one)
    return ZERO if one == ZERO else ONE if low > 0 or high < 0 else (0.0, 1.0)


def inverted(one: Interval) -> Interval:
    """`not`."""
    low, high = nonzero(one) or (0.0, 1.0)
    return 1 - high, 1 - low


def both(left: Interval, right: Interval) -> Interval:
    (a, b), (c, d) = (nonzero(one) or (0.0, 1.0) for one in (left, right))
    return min(a, c), min(b, d)


def either(left: Interval, right: Interval) -> Interval:
    return inverted(both(inverted(left), inverted(right)))


def least(left: Interval, right: Interval) -> Interval:
    if left is None and right is None:
        return None
    (a, b), (c, d) = wide(left), wide(right)
    return min(a, c), min(b, d)


def greatest(left: Interval, right: Interval) -> Interval:
    return negative(least(negative(left), negative(right)))


def comparison(name: str) -> Callable[[Interval, Interval], Interval]:
    """`lt` and its like, of two values."""

    def compare(left: Interval, right: Interval) -> Interval:
        (a, b), (c, d) = wide(left), wide(right)
        always, never = {
            "lt": (b < c, a >= d),
            "le": (b <= c, a > d),
            "gt": (a > d, b <= c),
            "ge": (a >= d, b < c),
            "eq": (a == b == c == d, b < c or d < a),
            "ne": (b < c or d < a, a == b == c == d),
        }[name]
        return ONE if always else ZERO if never else (0.0, 1.0)

    return compare


def _checked(low: float, high: float) -> Interval:
    return ANYTHING if math.isnan(low) or math.isnan(high) else (low, high)


def is_masked(pad: Interval, here: Interval) -> bool:
    """Whether a softmax, or a maximum, over tokens leaves the padding out."""
    low, high = wide(here)
    return pad is not None and pad[1] <= NEGLIGIBLE and -ORDINARY <= low <= high <= ORDINARY


def of_constant(low: float, high: float, labels: Sequence[str]) -> Fact:
    """A constant, or a tensor filled with one."""
    found = Fact(tuple(labels), (low, high), span=(low, high))
    return replace(found, pads=((low, high),) * len(found.tokens))
