"""Compare an engine with eager at the edges: zeros, tiny, large and shifted values, whole and half
numbers.

There eager fp32 and the fp64 reference may differ for good reasons: a step is taken on either side
of a rounding, an intermediate overflows in fp32 alone.  So an element agrees when it is near either
of the two, and what both make infinite or NaN has to be so in the engine.  Each row is judged by
the error that eager has in its own case, for in another the numbers are of another size.

In fp16 and bf16 the inputs are rounded first, so that eager fp32 and fp64 compute from what the
engine gets.  What eager loses at an element in the engine's dtype, a step or an overflow, is its
own, and an engine may lose it, too.
"""

import math
from collections.abc import Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from enginecast.verify.floor import FREE, KERNELS, least_floor, most_wrong
from enginecast.verify.floor import LIMIT as FLOORS
from enginecast.verify.metrics import SMALL_ROW, Array, times
from enginecast.verify.reference import ReferenceCase

LIMIT = 8.0
"""Error of a row over the largest error of a row that eager, or the program with the noise of other
kernels, has in the same case."""
LEAST_FLOORS = {"fp32": 64, "fp16": 16, "bf16": 16}
"""Below as many unit roundoffs a row agrees: in rows of a few elements, correct kernels of
different libraries differ as much."""
MISMATCHES = 0.02
"""Part of the integers of an output that may differ: what decides them may be a tie."""
LOST = 0.25
"""Where eager fp32 itself loses more in a row, nothing can be judged."""
LARGEST = float(np.finfo(np.float32).max)
HELD = {"fp32": LARGEST, "fp16": 65504.0 * 0.9, "bf16": LARGEST * 0.9}
"""Values past this may be infinite: a rounding decides."""
UNDERFLOW = 1e-30
"""Rows whose norm is less count as zero: hardware may flush the squares of such values."""

Floats = NDArray[np.float64]


def least_error(dtype: str) -> float:
    """The relative error below which a row agrees."""
    return LEAST_FLOORS[dtype] * least_floor(dtype)


def edge_failures(
    case: ReferenceCase, outputs: Mapping[str, Array], dtype: str = "fp32"
) -> Iterator[str]:
    """Say which outputs of an engine are neither eager's nor the reference's, and by how much.

    Args:
        case: with eager fp32, fp64, and what other kernels or, in 16 bits, eager itself may lose.
        dtype: that the engine computes in.
    """
    for name, plain in case.outputs.items():
        found, exact = outputs[name], case.reference[name]
        where = f"output {name!r}, case {case.name!r}"
        losses = case.losses.get(name)
        if dtype != "fp32" and losses is None:
            continue  # eager gives another size in this dtype
        moved = np.zeros(plain.shape) if losses is None else losses
        if found.shape != plain.shape or plain.shape != exact.shape:
            if plain.shape == exact.shape:
                yield f"{where}: its shape is {list(found.shape)}, eager gives {list(plain.shape)}"
        elif plain.dtype.kind in "biu":
            wrong = (found != plain) & (found != exact)
            if wrong.sum() > _mismatches(dtype, moved) * wrong.size:
                yield f"{where}: {int(wrong.sum())} of {wrong.size} values are not those of eager"
        elif dtype == "fp32":
            problems = _float_failures(found, plain, exact, moved)
            yield from (f"{where}: {problem}" for problem in problems)
        else:
            problems = _low_failures(found, plain, exact, moved, dtype)
            yield from (f"{where}: {problem}" for problem in problems)


def _mismatches(dtype: str, moved: Array) -> float:
    """The part of an output's integers that may differ."""
    if dtype == "fp32":
        return MISMATCHES
    rate = float(moved.mean()) if moved.size else 0.0
    return min(max(FREE[dtype], FLOORS * rate), most_wrong(rate))


def _float_failures(found: Array, plain: Array, exact: Array, moved: Array) -> Iterator[str]:
    sides = tuple(_rows(side) for side in (found, plain, exact))
    engine, eager, wanted = sides
    agrees = _equal(engine, eager) | _equal(engine, wanted)
    matters = ~np.isfinite(engine) | (~np.isfinite(eager) & ~np.isfinite(wanted))
    if (matters & ~agrees).any():
        yield _strange(matters & ~agrees, engine, eager)
        return
    with np.errstate(invalid="ignore", over="ignore"):
        error = np.fmin(np.abs(engine - eager), np.abs(engine - wanted))
    floor = _loss(eager, wanted)
    if floor > LOST:
        return
    kernels = min(_worst_row(_rows(moved), eager, wanted), KERNELS)
    allowed = max(LIMIT * max(floor, kernels), least_error("fp32"))
    worst = _worst_row(np.where(agrees, 0.0, error), eager, wanted)
    if worst > allowed:
        yield (
            f"its worst row has a relative error of {worst:.2g}, {times(worst / allowed * LIMIT)}"
            f" what eager fp32 or other kernels may lose there (limit {allowed:.2g})"
        )


def _low_failures(
    found: Array, plain: Array, exact: Array, moved: Array, dtype: str
) -> Iterator[str]:
    """The same in 16 bits, where eager's own loss at each element counts, and its overflow."""
    engine, eager, wanted, lost = (_rows(side) for side in (found, plain, exact, moved))
    held = np.isfinite(lost) & ~(np.abs(wanted) > HELD[dtype])
    agrees = ~held | _equal(engine, eager) | _equal(engine, wanted)
    matters = ~np.isfinite(engine) | (~np.isfinite(eager) & ~np.isfinite(wanted))
    if (matters & ~agrees).any():
        yield _strange(matters & ~agrees, engine, eager)
        return
    eager, wanted = (np.where(held, side, 0.0) for side in (eager, wanted))
    with np.errstate(invalid="ignore", over="ignore"):
        error = np.fmin(np.abs(engine - eager), np.abs(engine - wanted)) - lost
    floor = _worst_row(np.where(held, lost, 0.0), eager, wanted)
    if floor > LOST:
        return
    allowed = max(LIMIT * floor, least_error(dtype))
    worst = _worst_row(np.where(agrees, 0.0, np.maximum(error, 0.0)), eager, wanted)
    if worst > allowed:
        yield (
            f"its worst row has a relative error of {worst:.2g}, {times(worst / allowed * LIMIT)}"
            f" what eager {dtype} loses there (limit {allowed:.2g})"
        )


def _strange(where: NDArray[np.bool_], engine: Floats, eager: Floats) -> str:
    """Values that are not finite, or should not be."""
    row, column = np.argwhere(where)[0]
    return (
        f"{int(where.sum())} values are {engine[row, column]:.3g} and the like"
        f" where eager has {eager[row, column]:.3g}"
    )


def _loss(eager: Floats, wanted: Floats) -> float:
    """What eager fp32 loses in its worst row."""
    with np.errstate(invalid="ignore", over="ignore"):
        lost = np.abs(eager - wanted)
    return _worst_row(np.where(_equal(eager, wanted), 0.0, lost), eager, wanted)


def _worst_row(error: Floats, eager: Floats, wanted: Floats) -> float:
    """The largest error of a row relative to its length; what is not finite is judged elsewhere."""
    in_range = np.abs(wanted) <= LARGEST  # fp64 holds what fp32 does not
    size = np.where(in_range, wanted, np.where(np.isfinite(eager), eager, 0.0))
    lengths = np.linalg.norm(size, axis=1)
    least = SMALL_ROW * float(np.sqrt(np.mean(lengths**2))) if lengths.size else 0.0
    lengths = np.maximum(np.maximum(lengths, least), UNDERFLOW)
    errors = np.linalg.norm(np.where(error <= LARGEST, error, 0.0), axis=1)
    return float((errors / lengths).max(initial=0.0))


def _rows(array: Array) -> Floats:
    """As float64, [rows, length]."""
    widened = array.astype(np.float64)
    if not array.ndim:
        return widened.reshape(1, 1)
    return widened.reshape(math.prod(array.shape[:-1]), array.shape[-1])


def _equal(one: Floats, other: Floats) -> NDArray[np.bool_]:
    return np.asarray((one == other) | (np.isnan(one) & np.isnan(other)))
