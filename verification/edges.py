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
from msgspec.structs import replace
from numpy.typing import NDArray

from enginecast.runtime.bundle.manifest import Excess
from enginecast.verification.accept import ExcessReason
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
    least = LIMIT * least_floor(halves) if halves else least_error("fp32")
    for name, plain in case.outputs.items():
        found, exact = outputs[name], case.reference[name]
        nearest = in_other_orders(outputs, case.reference, case.orders)
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
            problems = _float_failures(found, plain, exact, moved, nearest.get(name, exact), least)
            yield from (_in_case(name, case.name, problem) for problem in problems)
        else:
            problems = _low_failures(found, plain, exact, moved, dtype)
            yield from (_in_case(name, case.name, problem) for problem in problems)


def _in_case(output: str, case: str, problem: str) -> str:
    text = f"output {output!r}, case {case!r}: {problem}"
    if not isinstance(problem, ExcessReason):
        return text
    return ExcessReason(text, replace(problem.excess, output=output, case=case))


def _excess(text: str, error: float, limit: float) -> ExcessReason:
    return ExcessReason(text, Excess(output="", error=error, limit=limit))


def _mismatches(dtype: str, moved: Array) -> float:
    """The share of an output's integers that may differ."""
    if dtype == "fp32":
        return MISMATCHES
    rate = float(moved.mean()) if moved.size else 0.0
    return min(max(FREE[dtype], FLOORS * rate), most_wrong(rate))


def _float_failures(
    found: Array, plain: Array, exact: Array, moved: Array, nearest: Array, least: float
) -> Iterator[str]:
    sides = tuple(_rows(side) for side in (found, plain, exact))
    engine, eager, wanted = sides
    agrees = _equal(engine, eager) | _equal(engine, wanted)
    matters = ~np.isfinite(engine) | (~np.isfinite(eager) & ~np.isfinite(wanted))
    if (matters & ~agrees).any():
        yield _strange(matters & ~agrees, engine, eager)
        return
    with np.errstate(invalid="ignore", over="ignore"):
        error = np.fmin(np.abs(engine - eager), np.abs(engine - wanted))
        error = np.fmin(error, np.abs(engine - _rows(nearest)))
    floor = _loss(eager, wanted)
    if floor > LOST:  # of eager itself: nothing can be judged
        return
    kernels = min(_worst_row(_rows(moved), eager, wanted), KERNELS)
    allowed = max(LIMIT * max(floor, kernels), least)
    worst = _worst_row(np.where(agrees, 0.0, error), eager, wanted)
    if worst > allowed:
        text = (
            f"its worst row has a relative error of {worst:.2g}, {times(worst / allowed * LIMIT)}"
            f" what eager fp32 or other kernels may lose there (limit {allowed:.2g})"
        )
        yield _excess(text, worst, allowed)


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
        text = (
            f"its worst row has a relative error of {worst:.2g}, {times(worst / allowed * LIMIT)}"
            f" what eager {dtype} loses there (limit {allowed:.2g})"
        )
        yield _excess(text, worst, allowed)


def _strange(where: NDArray[np.bool_], engine: Floats, eager: Floats) -> str:
    """Elements that are wrongly non-finite or wrongly finite."""
    row, column = np.argwhere(where)[0]
    return (
        f"{int(where.sum())} values are {engine[row, column]:.3g} and the like"
        f" where eager has {eager[row, column]:.3g}"
    )


def _loss(eager: Floats, wanted: Floats) -> float:
    """The error of eager fp32 in its worst row."""
    with np.errstate(invalid="ignore", over="ignore"):
        lost = np.abs(eager - wanted)
    return _worst_row(np.where(_equal(eager, wanted), 0.0, lost), eager, wanted)


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
