"""Find a row or channel of an output whose error exceeds eager's error there.

One norm over an output is dominated by its large values: next to boxes in pixels, the error of a
confidence does not show. So each vector along the last axis, and each index of the last axis and of
axis 1, is measured against its own size and eager's error in the same place.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

LIMIT = 8.0
"""Largest ratio of a part's error to eager's error in it."""
LEAST = 8.0
"""Lower bound on eager's error in a part, in unit roundoffs relative to its length."""
USUAL = 0.75
"""A part may lose what this share of all parts do, even if eager does not lose it there."""
ENOUGH = 16
"""A part of fewer elements that are rounded (a zero of relu is none) gets a limit that is higher by
as much: eager may be exact by luck."""
SAME = 1e-6
"""Elements of a part that differ by less, relative to its largest, are one sample of what eager
loses, and not several: on an image of one color, positions compute the same and round alike. What
varies by more, as a head does whose bias is large, is judged by every element."""
SLIGHT = 1e-3
"""Relative error up to which `SAME` applies: fp32 rounding is far smaller."""
LARGEST = 0.9
"""No part may be off by more, unless eager is off by `LOST` there, or by less where elements are
few: one of zeros is off by 1."""
LOST = 0.25
TINY = {"fp64": 1e-300, "fp32": 1e-36, "bf16": 1e-36, "fp16": 2.0**-24}
"""Absolute error of an element that is always allowed: what hardware may flush to zero."""

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Part:
    """A row or a channel, with errors relative to its length."""

    place: str
    """ "row [0, 3]" or "index 4 of axis 2"."""
    error: float
    allowed: float

    @property
    def excess(self) -> float:
        return self.error / self.allowed


def worst_part(
    found: Floats, wanted: Floats, loss: Floats, counts: NDArray[np.bool_], dtype: str, unit: float
) -> Part | None:
    """The part whose error is largest relative to its limit; None for an output without elements.

    Args:
        found: the engine's output; finite, like `wanted`.
        loss: magnitude of eager's error at each element.
        counts: mask of the elements that count, of the same shape.
        dtype: the engine's compute dtype, whose unit roundoff is used.
    """
    if not counts.any():
        return None
    # Dividing by the largest value first keeps the squares of tiny and huge values inside float64.
    scale = float(np.abs(wanted).max(where=counts, initial=0.0)) or 1.0
    squares = [np.where(counts, side / scale, 0.0) ** 2 for side in (found - wanted, wanted, loss)]
    whole = _relative(*(np.sqrt(side.sum(keepdims=True)).ravel() for side in reversed(squares[1:])))
    worst: Part | None = None
    rounded = counts & ((wanted != 0) | (loss != 0))
    for axes, name in _views(found.shape):
        count = np.maximum(rounded.sum(axis=axes), 1)
        error, length, lost = (np.sqrt(side.sum(axis=axes)) for side in squares)
        usual = np.quantile(_relative(lost, length), USUAL)
        least = max(LEAST * unit, float(whole.max()), float(usual))
        smallest = np.maximum(np.sqrt(count) * (TINY[dtype] / scale), 1e-300)
        allowed = np.maximum(_allowed(length, lost, least, count), smallest)
        beyond = error > allowed
        if beyond.any():
            samples = np.array(count)
            # How many of the elements of some parts differ, 1 at least.
            inner = range(-len(axes), 0)
            values = np.moveaxis(np.where(rounded, wanted, np.nan), axes, inner)[beyond]
            values = values.reshape(len(values), -1)
            largest = np.nanmax(np.abs(values), axis=1, initial=0.0, keepdims=True)
            with np.errstate(invalid="ignore", divide="ignore"):
                steps = np.sort(np.round(values / (SAME * largest)), axis=1)
            known = (np.diff(steps, axis=1) > 0).sum(axis=1)  # nothing is beyond NaN, which is last
            samples[beyond] = np.asarray(known + 1)
            by_luck = np.minimum(_allowed(length, lost, least, samples), SLIGHT * length)
            allowed = np.maximum(allowed, by_luck)
        at = np.unravel_index(int(np.argmax(error / allowed)), error.shape)
        size = float(length[at]) or 1.0
        part = Part(
            name.format(", ".join(str(int(i)) for i in at)),
            min(float(error[at]) / size, 1e30),
            min(float(allowed[at]) / size, 1e30),
        )
        if worst is None or part.excess > worst.excess:
            worst = part
    return worst


def _allowed(length: Floats, lost: Floats, least: float, samples: NDArray[np.int_]) -> Floats:
    """The largest allowed error of each part.

    Args:
        least: lower bound on eager's error, relative to the parts' length.
        samples: number of elements of each part that sample eager's error.
    """
    few = np.maximum(ENOUGH / samples, 1.0)
    allowed = LIMIT * few * np.maximum(lost, least * length)
    # Where eager itself has about this value, and not by luck, zero is not near.
    known = lost * few < LOST * length
    return np.where(known, np.minimum(allowed, LARGEST * length), allowed)


def _relative(lost: Floats, length: Floats) -> Floats:
    """0 where there is nothing that could be lost, and 1 at most."""
    return np.minimum(np.divide(lost, length, out=np.zeros_like(lost), where=length > 0), 1.0)


def _views(shape: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], str]]:
    """(the axes that a kind of part extends over, what one is called)."""
    rank = len(shape)
    if rank == 0:
        yield (), "the value{}"
        return
    yield (rank - 1,), "row [{}]"
    for axis in sorted({rank - 1, 1} if rank > 2 else {rank - 1}):
        yield tuple(other for other in range(rank) if other != axis), f"index {{}} of axis {axis}"
