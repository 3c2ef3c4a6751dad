"""Compare each row of a batch with what it is alone.

A runtime picks kernels by size, and one of them may be wrong in some batches only: TensorRT has
computed a SegFormer wrongly at batch sizes above one, in fp32 and without a word
(https://github.com/NVIDIA/TensorRT/issues/4853).  A case of several rows shows that at its own
batch size; here rows of one case are put into the batch sizes that no case has.
"""

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from enginecast.runtime.bundle.manifest import EngineRecord, Excess, Manifest, profile_of
from enginecast.runtime.size_checks import holds
from enginecast.verification.accepted_excess import ExcessReason
from enginecast.verification.floor import Floor, most_wrong
from enginecast.verification.metrics import NOT_FINITE, Array, Metrics
from enginecast.verification.reference import Reference, ReferenceCase, Rows
from enginecast.verification.verdict import FEW_VALUES, row_limit

SMALL = (1, 2, 3)
"""Batch sizes that are compared besides the greatest."""
PARTS = "parts from what it is alone"


@dataclass(frozen=True)
class RowError:
    """A row of a batch that is not what it is alone."""

    batch: int
    row: int
    output: str
    error: float
    """Relative L2 error of its worst part; of integers and booleans, the share that differs."""
    limit: float
    feeds: Mapping[str, Array]
    """The inputs of the batch, as the reference has them."""

    @property
    def reason(self) -> ExcessReason:
        """Why an engine is rejected."""
        text = (
            f"at batch {self.batch}, row {self.row} of {self.output!r} {PARTS}"
            f" (relative error {self.error:.2g}, limit {self.limit:.2g})"
        )
        error = min(self.error, NOT_FINITE)
        return ExcessReason(text, Excess(output=self.output, error=error, limit=self.limit))


def base_case(cases: Mapping[str, Mapping[str, Array]], inputs: Sequence[str]) -> str | None:
    """The case whose rows are compared: of those with three rows or more, else two, the one with
    the smallest rows.

    Args:
        cases: the inputs of each case.
        inputs: those that have a row for each element of the batch.
    """

    def key(name: str) -> tuple[int, float]:
        count = len(cases[name][inputs[0]])
        return -min(count, 3), sum(array.size for array in cases[name].values()) / count

    several = [name for name, found in cases.items() if inputs and len(found[inputs[0]]) > 1]
    return min(several, key=key, default=None)


def in_batch(case: ReferenceCase, rows: Rows, size: int) -> ReferenceCase:
    """A batch of the rows of a case, in turn, with what each is alone as its reference."""
    places = np.arange(size) % len(case.inputs[rows.inputs[0]])

    def taken(arrays: Mapping[str, Array], names: Sequence[str], axis: int = 0) -> dict[str, Array]:
        return {name: np.take(arrays[name], places, axis) for name in names if name in arrays}

    return ReferenceCase(
        f"rows in a batch of {size}",
        {**case.inputs, **taken(case.inputs, rows.inputs)},
        taken(case.outputs, rows.outputs),
        taken(case.reference, rows.outputs),
        taken(case.losses, rows.outputs),
        taken(case.orders, rows.outputs, axis=1),
    )


def batches(
    manifest: Manifest, record: EngineRecord, reference: Reference, *, every: bool = False
) -> Iterator[tuple[int, ReferenceCase]]:
    """Rows of a case in batches of 1, 2, 3 and the greatest size that has no more elements than the
    largest case; in each optimization profile of an engine that has them.

    Args:
        manifest, record: of the engine that is to run them.
        every: of those sizes, too, that a case has: its rows were compared there.
    """
    rows, cases = reference.rows, {case.name: case for case in reference.cases}
    if rows is None or not rows.outputs or manifest.guards:  # rows of one path may take another
        return
    of_rows = rows.inputs[0]
    symbol = next(spec.shape[0] for spec in manifest.inputs if spec.name == of_rows)
    if not isinstance(symbol, str) or symbol not in manifest.symbols:
        return
    least, most = manifest.symbols[symbol]
    step = manifest.steps.get(symbol, 1)
    elements = {n: sum(array.size for array in c.inputs.values()) for n, c in cases.items()}
    numbers: Sequence[int | None] = sorted({one.profile for one in record.profile}) or [None]
    in_profile = {name: profile_of(record.profile, case.shapes) for name, case in cases.items()}
    for number in numbers:
        fitting = {n: c.inputs for n, c in cases.items() if in_profile[n] == number}
        base = base_case(fitting, rows.inputs)
        if base is None:
            continue
        held = set() if every else {len(inputs[of_rows]) for inputs in fitting.values()}
        row = elements[base] / len(cases[base].inputs[of_rows])
        greatest = min(most, int(max(elements.values()) / row), _greatest(record, number, of_rows))
        for size in sorted({*SMALL, greatest - greatest % step} - held):
            if max(least, 1) <= size <= most and size % step == 0:
                case = in_batch(cases[base], rows, size)
                is_of_profile = profile_of(record.profile, case.shapes) == number
                if is_of_profile and _fits(manifest, case):
                    yield size, case


def _fits(manifest: Manifest, case: ReferenceCase) -> bool:
    """Whether sizes hold the conditions that an engine has for them."""
    sizes = {
        str(dim): size
        for spec in manifest.inputs
        for dim, size in zip(spec.shape, case.inputs[spec.name].shape, strict=True)
    }
    return all(holds(check.condition, sizes) for check in manifest.size_checks)


def _greatest(record: EngineRecord, number: int | None, name: str) -> int:
    """The largest batch of a profile."""
    found = (one for one in record.profile if one.profile == number and one.name == name)
    return next((one.greatest[0] for one in found), sys.maxsize)


def judge_rows(
    reference: Reference, batch: int, case: ReferenceCase, outputs: Mapping[str, Array]
) -> Iterator[RowError]:
    """The worst row of each output of a batch, where it is not what it is alone, within the limit
    that a verdict has for any row.
    """
    shapes = {name: array.shape for name, array in case.reference.items()}
    wrong = [name for name, shape in shapes.items() if outputs[name].shape != shape]
    yield from (RowError(batch, 0, name, math.inf, 0.0, case.inputs) for name in wrong)
    fitting = {name: array for name, array in outputs.items() if name not in wrong}
    for name, metrics in reference.compare(case, fitting).items():
        error = metrics.relative if metrics.wrong is not None else metrics.worst_row
        error = math.inf if metrics.nonfinite else error
        limit = _limit(reference.floor, name, metrics)
        if error > limit:
            at = metrics.first_nonfinite or metrics.worst_at or (0,)
            if outputs[name].ndim == 1 and not metrics.nonfinite:
                sides = (outputs[name], case.reference[name])
                found, wanted = (side.astype(np.float64) for side in sides)
                at = (int(np.abs(found - wanted).argmax()),)
            yield RowError(batch, at[0], name, error, limit, case.inputs)


def _limit(floor: Floor, name: str, metrics: Metrics) -> float:
    """The largest error of a row; infinite for an output whose rows may differ."""
    if name in floor.by_eager:
        return math.inf
    if metrics.wrong is None:
        planned = floor.max_error if floor.rounding else None
        return max(row_limit(floor, name), planned or 0.0)
    return most_wrong(floor.of(name)) if metrics.rows >= FEW_VALUES else math.inf
