"""Facts about a value, for each row of tokens, when padding is cut off."""

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import product
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
ZERO, ONE, UNSURE = (0.0, 0.0), (1.0, 1.0), (0.0, 1.0)


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
    here: Interval
    """Where all tokens are the same valid one."""
    pads: tuple[Interval, ...]
    """For each dimension: where its token is padding and the others, each the same one, are valid;
    says nothing of a dimension without tokens."""
    span: Interval
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

    @property
    def index_along(self) -> int | None:
        """The dimension whose index the value is."""
        steps = list(self.steps or ())
        is_index = not self.offset and sorted(steps) == [0] * (len(steps) - 1) + [1]
        return steps.index(1) if is_index else None


def alike(labels: tuple[str, ...], bounds: Interval) -> Fact:
    """A value with the same bounds everywhere."""
    return Fact(labels, bounds, (bounds,) * len(labels), bounds)


def position(
    labels: tuple[str, ...], steps: tuple[int, ...], offset: int, side: Side, longest: float
) -> Fact:
    """A sum of indices: what is known of it follows from where padding is.

    Args:
        longest: the largest number of tokens.
    """
    fact = replace(alike(labels, ANYTHING), steps=steps, offset=offset)
    if any(step for dim, step in enumerate(steps) if dim not in fact.tokens):
        return fact
    low, high = (sum(bound(step * longest, 0) for step in steps) + offset for bound in (min, max))
    span = float(low), float(high)
    if sum(steps) != 0:
        return replace(fact, here=span, pads=(span,) * len(labels), span=span)
    pads = [span] * len(labels)
    for dim, step in enumerate(steps if side == "right" else ()):
        # On the right, the index of padding is greater than those of valid tokens.
        if not any(other * step > 0 for at, other in enumerate(steps) if at != dim):
            nearest = float(step + offset)
            pads[dim] = (
                (nearest, max(nearest, span[1])) if step > 0 else (min(nearest, span[0]), nearest)
            )
    return replace(fact, here=(float(offset),) * 2, pads=tuple(pads), span=span)


def is_small(interval: Interval) -> bool:
    """Whether ordinary numbers stay ordinary beside these."""
    return interval is None or (interval[0] >= -SMALL and interval[1] <= SMALL)


def wide(interval: Interval) -> tuple[float, float]:
    """The bounds of numbers, ordinary ones too."""
    return (-ORDINARY, ORDINARY) if interval is None else interval


def is_masked(pad: Interval, here: Interval) -> bool:
    """Whether a softmax, or a maximum, over tokens leaves the padding out."""
    low, high = wide(here)
    return pad is not None and pad[1] <= NEGLIGIBLE and -ORDINARY <= low <= high <= ORDINARY


def _monotonic(compute: Callable[..., float]) -> Callable[..., Interval]:
    """The bounds of a function that is largest and smallest at bounds of what it is given."""

    def bounds(*given: Interval) -> Interval:
        if None in given and all(map(is_small, given)):
            return None
        ends = [compute(*end) for end in product(*map(wide, given))]
        return ANYTHING if any(map(math.isnan, ends)) else (min(ends), max(ends))

    return bounds


_plus, _minus, _times = map(_monotonic, (operator.add, operator.sub, operator.mul))
_least, _greatest = map(_monotonic, (min, max))


def times(left: Interval, right: Interval) -> Interval:
    if ZERO in (left, right) and all(map(math.isfinite, (*wide(left), *wide(right)))):
        return ZERO
    return _times(left, right)


def _over(left: Interval, right: Interval) -> Interval:
    if right is None:
        return ZERO if left == ZERO else None if is_small(left) else ANYTHING
    if right[0] <= 0 <= right[1]:
        return ANYTHING
    return times(left, (1 / right[1], 1 / right[0]))


def _magnitude(one: Interval) -> Interval:
    if one is None:
        return None
    low, high = sorted((abs(one[0]), abs(one[1])))
    return (0.0 if one[0] <= 0 <= one[1] else low), high


def chosen(condition: Interval, yes: Interval, no: Interval) -> Interval:
    """`where`."""
    known = nonzero(condition)
    if known in (ZERO, ONE) or yes == no:
        return no if known == ZERO else yes
    if None in (yes, no) and is_small(yes) and is_small(no):
        return None
    (a, b), (c, d) = wide(yes), wide(no)
    return min(a, c), max(b, d)


def nonzero(one: Interval) -> tuple[float, float]:
    low, high = wide(one)
    return ZERO if one == ZERO else ONE if low > 0 or high < 0 else UNSURE


def _inverted(one: Interval) -> Interval:
    return _minus(ONE, nonzero(one))


def _both(left: Interval, right: Interval) -> Interval:
    return _least(nonzero(left), nonzero(right))


def _either(left: Interval, right: Interval) -> Interval:
    return _greatest(nonzero(left), nonzero(right))


def _less(left: Interval, right: Interval) -> Interval:
    (a, b), (c, d) = wide(left), wide(right)
    return ONE if b < c else ZERO if a >= d else UNSURE


def _equal(left: Interval, right: Interval) -> Interval:
    (a, b), (c, d) = wide(left), wide(right)
    return ONE if a == b == c == d else ZERO if b < c or d < a else UNSURE


COMPARISONS: Mapping[str, Callable[[Interval, Interval], Interval]] = {
    "lt": _less,
    "gt": lambda a, b: _less(b, a),
    "ge": lambda a, b: _inverted(_less(a, b)),
    "le": lambda a, b: _inverted(_less(b, a)),
    "eq": _equal,
    "ne": lambda a, b: _inverted(_equal(a, b)),
}
BOUNDS: Mapping[str, Callable[..., Interval]] = {
    "add": _plus,
    "sub": _minus,
    "rsub": lambda a, b: _minus(b, a),
    "mul": times,
    "div": _over,
    "neg": _monotonic(operator.neg),
    "abs": _magnitude,
    "where": chosen,
    "masked_fill": lambda a, mask, filling: chosen(mask, filling, a),
    **dict.fromkeys(("minimum", "min"), _least),
    **dict.fromkeys(("maximum", "max"), _greatest),
    **dict.fromkeys(("logical_not", "bitwise_not"), _inverted),
    **dict.fromkeys(("logical_and", "bitwise_and", "__and__"), _both),
    **dict.fromkeys(("logical_or", "bitwise_or", "__or__"), _either),
    **COMPARISONS,
}
"""Bounds of what an elementwise op gives, by its name; `bitwise` of booleans alone."""
