"""Compare an engine with eager at the edges: zeros, tiny, large and shifted values, whole and half
numbers.

There eager fp32 and the fp64 reference may differ for good reasons: a rounding decides a step, or
an intermediate overflows only in fp32. So an element agrees if it is near either of the two, and
one that is infinite or NaN in both must be so in the engine. Each row is judged by eager's error in
the same case, since magnitudes differ between cases.

In fp16 and bf16 the inputs are rounded first, so that eager fp32 and fp64 compute from the engine's
inputs. An engine may have the error that eager itself has at an element in that dtype, such as a
step or an overflow.
"""

import math
from collections.abc import Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from enginecast.runtime.bundle.manifest import Excess
from enginecast.verification.accepted_excess import ExcessReason, placed
from enginecast.verification.floor import FREE, KERNELS, LOST, least_floor, most_wrong
from enginecast.verification.floor import LIMIT as FLOORS
from enginecast.verification.metrics import SMALL_ROW, Array, times
from enginecast.verification.reference import ReferenceCase, in_other_orders

LIMIT = 8.0
"""Largest ratio of a row's error to the largest row error in the same case of eager, or of the
program with kernel noise."""
LEAST_FLOORS = {"fp32": 64, "fp16": 16, "bf16": 16}
"""A row agrees if its error is below this many unit roundoffs: in short rows, correct kernels of
different libraries differ by as much."""
MISMATCHES = 0.02
"""Share of an output's integers that may differ: a tie may decide them."""
LARGEST = float(np.finfo(np.float32).max)
HELD = {"fp32": LARGEST, "fp16": 65504.0 * 0.9, "bf16": LARGEST * 0.9}
"""Values past this may be infinite: a rounding decides."""
UNDERFLOW = 1e-30
"""Rows with a smaller norm count as zero: hardware may flush the squares of such values."""

Floats = NDArray[np.float64]


def least_error(dtype: str) -> float:
    """The relative error below which a row agrees."""
    return LEAST_FLOORS[dtype] * least_floor(dtype)


def edge_failures(
    case: ReferenceCase, outputs: Mapping[str, Array], dtype: str = "fp32", halves: str = ""
) -> Iterator[str]:
    """Report which outputs of an engine agree with neither eager nor the reference, and by how
    much.

    Args:
        case: eager fp32 and fp64 outputs, and the errors of other kernels or, in 16 bits, of eager.
        dtype: the engine's compute dtype.
        halves: see `Floor.halves`.
    """
    least = LIMIT * least_floor(halves) if halves else least_error(dtype)
    nearest = in_other_orders(outputs, case.reference, case.orders)
    for name, plain in case.outputs.items():
        found, exact = outputs[name], case.reference[name]
        where = f"output {name!r}, case {case.name!r}: "
        losses = case.losses.get(name)
        if dtype != "fp32" and losses is None:
            continue  # eager gives another size in this dtype
        moved = np.zeros(plain.shape) if losses is None else losses
        if found.shape != plain.shape or plain.shape != exact.shape:
            if plain.shape == exact.shape:
                yield f"{where}its shape is {list(found.shape)}, eager gives {list(plain.shape)}"
        elif plain.dtype.kind in "biu":
            wrong = (found != plain) & (found != exact)
            if wrong.sum() > _mismatches(dtype, moved) * wrong.size:
                yield f"{where}{int(wrong.sum())} of {wrong.size} values are not those of eager"
        else:
            sides = [_rows(x) for x in (found, plain, exact, moved, nearest.get(name, exact))]
            problem = _difference(*sides, dtype=dtype, least=least)
            if problem:
                yield placed(where, problem, output=name, case=case.name)


def _mismatches(dtype: str, moved: Array) -> float:
    """The share of an output's integers that may differ."""
    if dtype == "fp32":
        return MISMATCHES
    rate = float(moved.mean()) if moved.size else 0.0
    return min(max(FREE[dtype], FLOORS * rate), most_wrong(rate))


def _difference(
    engine: Floats,
    eager: Floats,
    wanted: Floats,
    lost: Floats,
    nearest: Floats,
    *,
    dtype: str,
    least: float,
) -> str:
    """How the rows of an engine agree with neither side; empty where they do.

    Args:
        lost: in fp32 how far other kernels move each element; in 16 bits, where eager's own loss
            and its overflow count at each element, that.
        nearest: in fp32, the nearest result of any order of sums.
        least: the relative error below which a row agrees.
    """
    is_fp32 = dtype == "fp32"
    held = np.isfinite(lost) & ~(np.abs(wanted) > HELD[dtype]) | is_fp32
    agrees = ~held | _equal(engine, eager) | _equal(engine, wanted)
    matters = ~np.isfinite(engine) | (~np.isfinite(eager) & ~np.isfinite(wanted))
    if (matters & ~agrees).any():
        return _strange(matters & ~agrees, engine, eager)
    eager, wanted = (np.where(held, side, 0.0) for side in (eager, wanted))
    with np.errstate(invalid="ignore", over="ignore"):
        error = np.fmin(np.abs(engine - eager), np.abs(engine - wanted))
        if is_fp32:
            error = np.fmin(error, np.abs(engine - nearest))
            own = np.where(_equal(eager, wanted), 0.0, np.abs(eager - wanted))
        else:
            error = np.maximum(error - lost, 0.0)
            own = np.where(held, lost, 0.0)
    floor = _worst_row(own, eager, wanted)
    if floor > LOST:  # of eager itself: nothing can be judged
        return ""
    kernels = min(_worst_row(lost, eager, wanted), KERNELS) if is_fp32 else 0.0
    allowed = max(LIMIT * max(floor, kernels), least)
    worst = _worst_row(np.where(agrees, 0.0, error), eager, wanted)
    if worst <= allowed:
        return ""
    by = "eager fp32 or other kernels may lose there" if is_fp32 else f"eager {dtype} loses there"
    return ExcessReason(
        f"its worst row has a relative error of {worst:.2g}, {times(worst / allowed * LIMIT)}"
        f" what {by} (limit {allowed:.2g})",
        Excess(output="", error=worst, limit=allowed),
    )


def _strange(where: NDArray[np.bool_], engine: Floats, eager: Floats) -> str:
    """Elements that are wrongly non-finite or wrongly finite."""
    row, column = np.argwhere(where)[0]
    return (
        f"{int(where.sum())} values are {engine[row, column]:.3g} and the like"
        f" where eager has {eager[row, column]:.3g}"
    )


def _worst_row(error: Floats, eager: Floats, wanted: Floats) -> float:
    """The largest error of a row relative to its norm; non-finite elements are judged elsewhere."""
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
