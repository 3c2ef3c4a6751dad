"""Compare the program after every pass with the program before, and with an fp64 reference.

Each promise of a pass has its own criterion: bit-equal, no worse than before, or no worse than
eager in the new dtype.
"""

import copy
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.export import ExportedProgram

from enginecast.passes.ir.base import Pass, Promise
from enginecast.passes.ir.computation import Computation, computation
from enginecast.passes.ir.edit import structural_copy
from enginecast.passes.ir.pipeline import PassRun
from enginecast.runtime.device.torch_threads import torch_threads
from enginecast.verification.boundaries import Boundary, Snapshot, renamed, snapshots
from enginecast.verification.eager.kernel_noise import rounded_outputs
from enginecast.verification.eager.outputs import Case, as_array, mask_of, reference_program
from enginecast.verification.floor import LIMIT, ROUNDING, UNIT_ROUNDOFF, Floor, least_floor
from enginecast.verification.metrics import (
    BEYOND,
    Metrics,
    measure,
    pool,
    ratio,
    row_mask,
    times,
)
from enginecast.verification.reference import Reference
from enginecast.verification.report.data import PassCheck
from enginecast.verification.verdict import ROW_LAXITY

MOVED = 1e-2
"""A boundary with a larger error, while the outputs are right, counts as moved and not as wrong:
its last value is now another one (a residual sum inside a fused norm, or a stream rescaled by a
power of two)."""
MOVED_FLOORS = 10.0
"""The same in units of the floor, for dtypes whose own error is near `MOVED`."""
FEW = 64
"""A boundary with fewer elements gets the laxer limit, since it is too small a sample of the
noise."""
PROMISES: tuple[Promise, ...] = ("exact", "reordered", "precision")
"""The promises, strictest first."""
SCATTER = 1e-4
"""A boundary with a larger error before the pass gets the laxer limit too: in half precision one
rounding can change an attention row, and a T5 with outlier channels moved by 2.5 floors."""


class Observer:
    """Compares the program after every pass with the program before; pass it to `run_pipeline`.

    Two programs are run per case at the start (fp64 reference, captured program) and one after
    every pass that changed what is computed.

    Args:
        program: as captured, before any pass; not modified.
        cases: one or two; more make every pass slower and find little more.
        names: of the outputs.
        reference: of these cases and others; its floor judges passes that change precision. Without
            it those are only checked for values that are not finite, and every row counts.
        start: the program before the first observed pass; None: `program`.
        known: snapshots of `reference_program(program)` and of `program` for the cases, if already
            run.
        threads: torch's within an operator, as `known` ran: its products differ in bits by how many
            share them. None: as many as are set.

    A broken promise is recorded in `checks`, and later passes are still checked.
    """

    def __init__(
        self,
        program: ExportedProgram,
        cases: Sequence[Case],
        reference: Reference | None = None,
        *,
        names: Sequence[str] | None = None,
        start: ExportedProgram | None = None,
        known: tuple[list[Snapshot], list[Snapshot]] | None = None,
        threads: int | None = None,
    ) -> None:
        self.threads = threads
        self.names = None if names is None else tuple(names)
        self.cases = tuple(cases)
        mask_input = None if reference is None else reference.mask_input
        self.masks = [mask_of(case, mask_input) for case in self.cases]
        self.judge_by(reference)
        start = program if start is None else start
        if known is None:
            known = self._run(reference_program(program)), self._run(start)
        self._reference, self._before = known
        self._state = self._computation(start)
        self._rounded: ExportedProgram | None = None
        """As the last pass that changed precision left it."""
        self.checks: list[PassCheck] = []

    def __call__(self, pass_: Pass, program: ExportedProgram, run: PassRun) -> None:
        """Check one pass; the next is compared with what this one left."""
        self.advance(self.compare(pass_, program, run))

    def judge_by(self, reference: Reference | None) -> None:
        """Judge passes that change precision by the floor of a reference."""
        if reference is None:
            self.rules = Rules(None, frozenset())
        else:
            own = frozenset(case.name for case in self.cases)
            self.rules = Rules(reference.floor.only(own), reference.masked)

    def compare(self, pass_: Pass, program: ExportedProgram, run: PassRun) -> "PassComparison":
        """Check one pass; later passes are compared with the same program until `advance`."""
        start = time.perf_counter()
        state = self._computation(program)
        same = state.outputs == self._state.outputs and state.checks <= self._state.checks
        after = self._known(program, state) if same else self._run(program)
        runs = [
            CaseRuns(case.name, mask, *snapshots)
            for case, mask, *snapshots in zip(
                self.cases, self.masks, self._reference, self._before, after, strict=True
            )
        ]
        check = self.rules.check(pass_, run, runs, time.perf_counter() - start)
        if check.failure and pass_.promise == "reordered" and self._rounded is not None:
            self.rules = replace(self.rules, spread=self._spread(self._rounded))
            check = self.rules.check(pass_, run, runs, time.perf_counter() - start)
        rounded = structural_copy(program) if pass_.promise == "precision" else self._rounded
        return PassComparison(check, runs, after, state, rounded)

    def _spread(self, program: ExportedProgram) -> Mapping[str, float]:
        """The largest error of each output with one step of 16 bits of noise in the program."""
        if self.rules.spread:
            return self.rules.spread
        names = tuple(self._reference[0].outputs)
        runs = [
            CaseRuns(case.name, mask, wanted, before, before)
            for case, mask, wanted, before in zip(
                self.cases, self.masks, self._reference, self._before, strict=True
            )
        ]
        samples = rounded_outputs(program, [case.inputs for case in self.cases], names)
        found = {}
        for name in names:
            each = (
                pool(
                    self.rules.measure(name, run, outputs[name])
                    for run, outputs in zip(runs, sample, strict=True)
                )
                for sample in samples
            )
            found[name] = max(metrics.relative for metrics in each)
        return found

    def advance(self, comparison: "PassComparison") -> None:
        """Compare the next pass with the program that was just checked."""
        self._before, self._state = comparison.after, comparison.state
        self._rounded = comparison.rounded
        self.checks.append(comparison.check)

    def fork(self) -> "Observer":
        """An independent observer that continues from here, without checks."""
        other = copy.copy(self)
        other.checks = []
        return other

    def _known(self, program: ExportedProgram, state: Computation) -> list[Snapshot]:
        """The snapshots of a program that computes the same as the one before it."""
        if not state.values:
            return self._before
        return renamed(self._before, self._state.values, program, state.values)

    def _computation(self, program: ExportedProgram) -> Computation:
        return computation(program, [case.inputs for case in self.cases])

    def _run(self, program: ExportedProgram) -> list[Snapshot]:
        inputs = [case.inputs for case in self.cases]
        with torch_threads(self.threads):
            return snapshots(program, inputs, names=self.names, masks=self.masks)


@dataclass(frozen=True)
class PassComparison:
    """A program after a pass, compared with the one before."""

    check: PassCheck
    runs: Sequence["CaseRuns"]
    after: list[Snapshot]
    state: Computation
    rounded: ExportedProgram | None
    """As the last pass that changed precision left it."""


@dataclass(frozen=True)
class CaseRuns:
    """The three runs of one case that a check looks at."""

    case: str
    mask: Tensor | None
    reference: Snapshot
    before: Snapshot
    after: Snapshot


@dataclass(frozen=True)
class Check:
    """One place where the program was compared."""

    place: str
    """Module path, or "output 'NAME'"."""
    source: str
    error: float
    """Relative L2 error against fp64 after the pass; for "exact" the change from before."""
    floor: float
    """The floor that the error is compared with; 0 for "exact"."""
    problem: str = ""
    """Why it fails, in words; empty if it passes."""
    is_finite: bool = True
    """Whether every value is finite that is finite in fp64: else `error` is that of the others."""

    @property
    def ratio(self) -> float:
        return ratio(self.error, self.floor)

    @property
    def may_have_moved(self) -> bool:
        return bool(self.problem) and self.error > max(MOVED, MOVED_FLOORS * self.floor)


@dataclass(frozen=True)
class Rules:
    """Judges the runs before and after one pass.

    Args:
        floor: eager in the target dtype; None: passes that change precision are only checked for
            finite values.
        masked: outputs whose rows follow the mask.
    """

    floor: Floor | None
    masked: frozenset[str]
    spread: Mapping[str, float] = field(default_factory=dict)
    """What each output loses where its values in 16 bits are rounded otherwise: one rounding can
    turn a row of attention, and no pass is to blame for that."""

    def check(
        self, pass_: Pass, run: PassRun, runs: Sequence[CaseRuns], seconds: float
    ) -> PassCheck:
        """Compare the program after a pass with the one before it."""
        outputs = [self._output(pass_.promise, name, runs) for name in runs[0].after.outputs]
        inner = list(self.inner(pass_.promise, runs))
        moved: tuple[str, ...] = ()
        if not any(check.problem for check in outputs):
            moved = tuple(check.place for check in inner if check.may_have_moved)
            inner = [check for check in inner if check.place not in moved]
            # Those whose last value is another one than before.
            first = runs[0]
            gone = [
                module
                for module, values in first.before.boundaries.items()
                if _counterpart(values[-1], values, first.after.boundaries.get(module, ())) is None
            ]
            moved = (*gone, *moved)
        failing = [check for check in (*inner, *outputs) if check.problem]
        # Of several places that are not finite, the first is worst.
        worst = max(
            failing[:1] or (*inner, *outputs),
            key=lambda check: (not check.is_finite, check.is_finite and check.ratio),
        )
        return PassCheck(
            name=pass_.name,
            promise=pass_.promise,
            rewritten=run.rewritten,
            left_alone=len(run.sites) - run.rewritten,
            seconds=run.seconds,
            check_seconds=seconds,
            worst_place=worst.place,
            worst_source=worst.source,
            worst_error=worst.error if worst.is_finite else None,
            worst_ratio=worst.ratio if worst.is_finite else None,
            modules={check.place: check.error if check.is_finite else None for check in inner},
            moved=moved,
            failure=_failure(pass_, failing) if failing else "",
        )

    def _output(self, promise: Promise, name: str, runs: Sequence[CaseRuns]) -> Check:
        place = f"output {name!r}"
        after = pool(self.measure(name, run, run.after.outputs[name]) for run in runs)
        pairs = [(run.before.outputs[name], run.after.outputs[name]) for run in runs]
        change = pool(measure(as_array(b), as_array(a)) for a, b in pairs)
        if after.nonfinite and change.nonfinite:
            return _lost(place, "", after.nonfinite, _first_lost(runs))
        if promise == "exact":
            same = all(_bit_equal(a, b) for a, b in pairs)
            check = _exact(place, "", change.relative, same)
        elif promise == "precision":
            floor = BEYOND if self.floor is None else self.floor.of(name)
            check = _judged(place, "", after.relative, floor)
        else:
            before = pool(self.measure(name, run, run.before.outputs[name]) for run in runs)
            least = ROUNDING * _roundoff(runs[0].after.outputs[name].dtype)
            kernels = 0.0 if self.floor is None else self.floor.of(name, kernels=True)
            floor = max(before.relative, least, kernels, self.spread.get(name, 0.0))
            check = _judged(place, "", after.relative, floor)
        return replace(check, is_finite=not after.nonfinite)

    def measure(self, name: str, run: CaseRuns, found: Tensor) -> Metrics:
        """The error of an output against fp64, of the rows that count."""
        wanted = as_array(run.reference.outputs[name])
        mask = None if run.mask is None or name not in self.masked else as_array(run.mask)
        return measure(as_array(found), wanted, row_mask(wanted.shape, mask))

    def inner(self, promise: Promise, runs: Sequence[CaseRuns]) -> Iterator[Check]:
        """The checks at every module boundary that all runs have, in order of execution."""
        for module in dict.fromkeys(name for run in runs for name in run.after.boundaries):
            here = [run for run in runs if module in run.before.boundaries]  # the path it took
            found = [each for run in here if (each := _at(module, run)) is not None]
            if found and len(found) == len(here):
                yield self._boundary(promise, module, found)

    def _boundary(self, promise: Promise, module: str, found: Sequence["_Compared"]) -> Check:
        last = found[0].after
        lost = sum(each.lost for each in found)
        if lost:
            culprit = self.floor.culprit if self.floor is not None else ""
            detail = culprit or f"the largest finite one is {last.max_abs:.3g}"
            return _lost(module, last.source, lost, detail)
        if promise == "exact":
            change = _mean([each.change for each in found])
            check = _exact(module, last.source, change, all(each.same for each in found))
            return replace(check, is_finite=all(each.is_finite for each in found))
        error = _mean([each.error for each in found])
        before = _mean([each.error_before for each in found])
        if promise == "precision":
            least = 0.0  # for display only
            if self.floor is not None:
                is_planned = bool(self.floor.rounding)
                least = self.floor.largest if is_planned else least_floor(self.floor.dtype)
            check = Check(module, last.source, error, max(before, least))
        else:
            few = sum(each.after.sample.numel() for each in found) < FEW
            laxity = ROW_LAXITY if few or before > SCATTER else 1.0
            floor = max(before, ROUNDING * _roundoff(last.dtype))
            check = _judged(module, last.source, error, floor, laxity)
        return replace(check, is_finite=all(each.is_finite for each in found))


def _judged(place: str, source: str, error: float, floor: float, laxity: float = 1.0) -> Check:
    check, limit = Check(place, source, error, floor), LIMIT * laxity
    if check.ratio <= limit:
        return check
    problem = (
        f"the error is {times(check.ratio)} the floor (relative L2 {error:.2g} against fp64, "
        f"floor {floor:.2g}, limit {times(limit)})"
    )
    return replace(check, problem=problem)


@dataclass(frozen=True)
class _Compared:
    """One module boundary in one case, before and after."""

    after: Boundary
    before: Boundary
    reference: Boundary

    @property
    def error(self) -> float:
        return self.after.distance(self.reference)

    @property
    def error_before(self) -> float:
        return self.before.distance(self.reference)

    @property
    def change(self) -> float:
        return self.after.distance(self.before)

    @property
    def same(self) -> bool:
        return self.after.digest == self.before.digest and self.after.dtype == self.before.dtype

    @property
    def is_finite(self) -> bool:
        """Whether the value after the pass has no more non-finite elements than in fp64."""
        return self.after.nonfinite <= self.reference.nonfinite

    @property
    def lost(self) -> int:
        return max(0, self.after.nonfinite - max(self.before.nonfinite, self.reference.nonfinite))


def _at(module: str, run: CaseRuns) -> _Compared | None:
    """Compare a module's value in all three runs; None if a run lacks it."""
    before = run.before.boundaries.get(module, ())
    if not before:
        return None
    old = before[-1]
    wanted = _counterpart(old, before, run.reference.boundaries.get(module, ()))
    after = _counterpart(old, before, run.after.boundaries.get(module, ()))
    return None if wanted is None or after is None else _Compared(after, old, wanted)


def _counterpart(
    old: Boundary, before: Sequence[Boundary], found: Sequence[Boundary]
) -> Boundary | None:
    """The counterpart of `old` in another run: an equal value, that of the same node, or a
    replacement from the same line of the same module.

    Any other value that leaves the module is not a counterpart: the previous layer's differs only
    by one residual.
    """
    fitting = [b for b in found if b.shape == old.shape]
    equal = [b for b in fitting if b.digest == old.digest]
    same = [b for b in fitting if b.node == old.node]
    known = {b.node for b in before}
    place = (old.module, old.source)
    instead = [b for b in fitting if b.node not in known and (b.module, b.source) == place]
    return next(iter([*equal[-1:], *same, *instead[-1:]]), None)


def _mean(errors: Sequence[float]) -> float:
    """Root mean square over the cases."""
    return min(math.hypot(*errors) / math.sqrt(len(errors)), BEYOND)


def _bit_equal(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are the same; NaN is NaN, whatever its bits."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(one, other) or (
        one.is_floating_point() and torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)
    )


def _exact(place: str, source: str, change: float, same: bool) -> Check:
    if same:
        return Check(place, source, 0.0, 0.0)
    problem = f"the value is no longer bit-equal (relative change {change:.2g})"
    # A change may sit outside of the sample, or be one of dtype alone.
    return Check(place, source, max(change, UNIT_ROUNDOFF["fp64"]), 0.0, problem)


def _lost(place: str, source: str, count: int, detail: str) -> Check:
    problem = f"{count} values are not finite ({detail})"
    return Check(place, source, BEYOND, 0.0, problem, is_finite=False)


def _first_lost(runs: Sequence[CaseRuns]) -> str:
    """The first check with non-finite values, in order of execution."""
    for run in runs:
        for module in run.after.boundaries:
            place = _at(module, run)
            if place is not None and place.lost:
                return (
                    f"first at {module} {place.after.source}, "
                    f"where the largest finite value is {place.after.max_abs:.3g}"
                )
    return "at no module boundary before it"


def _roundoff(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps / 2 if dtype.is_floating_point else 0.0


def _failure(pass_: Pass, failing: Sequence[Check]) -> str:
    """The failure message: names the first place, where the error arises, and the worst."""

    def named(check: Check) -> str:
        return f"{check.place} ({check.source})" if check.source else check.place

    first, worst = failing[0], max(failing, key=lambda check: check.ratio)
    rest = f"; {len(failing) - 1} more places fail" if len(failing) > 1 else ""
    if worst.ratio > first.ratio:
        rest += f", the worst is {named(worst)} with {times(worst.ratio)}"
    return f"{pass_.name!r} promises {pass_.promise!r}, but at {named(first)} {first.problem}{rest}"
