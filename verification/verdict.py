"""Judge an engine: its error may be at most a few times eager's own error in the same dtype.

The tolerance is the noise floor times a limit, so a verdict reads "1.1x the error of eager bf16"
and there is no constant to argue about.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from enginecast.runtime.bundle.manifest import Excess, Outcome, OutputVerdict, Verdict, Where
from enginecast.verification.accept import ExcessReason, described, sort_out, way_out
from enginecast.verification.floor import LARGEST_FLOOR, LIMIT, UNIT_ROUNDOFF, Floor, most_wrong
from enginecast.verification.metrics import (
    BEYOND,
    Comparison,
    Metrics,
    output_names,
    pool_output,
    ratio,
    times,
)

QUANTIZED_LIMIT = 2.0
"""The limit if the floor is mostly a plan's rounding: its simulation and the engine round the same
values with the same scales, so their errors are closer than those of two precisions."""
ROW_LAXITY = 2.0
"""The worst row may exceed the pooled limit by this factor: extremes vary more than means."""
LARGEST_ROW = 0.9
"""No row may have a larger relative error, whatever the floor: a row of zeros has error 1."""
TOO_GOOD = 0.01
"""An engine in eager's dtype cannot have an error below this share of eager's: then the floor
belongs to another model."""
KERNELS = ", or of its kernels"
"""Added to the description of a floor that includes the error of a backend's kernels."""
NOISE = "zero but for rounding, in eager fp32 as well, and so no engine can be compared in it"
FEW_VALUES = 4
"""Cases with fewer integers are judged only pooled with the others."""
LARGE = 256.0
"""Size of a floor, in unit roundoffs, from which on `TOO_GOOD` is checked."""


@dataclass(frozen=True)
class _Judged:
    """One output of one comparison."""

    name: str
    pooled: Metrics
    floor: float
    limit: float
    failures: tuple[str, ...]
    kernels: bool = False
    """Whether the floor includes the error of a backend's kernels."""

    @property
    def ratio(self) -> float:
        return ratio(self.pooled.relative, self.floor)

    @property
    def by_order(self) -> float:
        """The part of the error that another order of sums explains."""
        distance = ratio(self.pooled.distance, self.pooled.reference_norm)
        return max(distance - self.pooled.relative, 0.0)


def limit_of(floor: Floor) -> float:
    """The largest allowed ratio of a pooled error to the floor."""
    return QUANTIZED_LIMIT if floor.rounding else LIMIT


def judge(
    measured: Comparison | None,
    floor: Floor,
    *,
    where: Where,
    engine_ran: bool,
    emulated: Comparison | None = None,
    problems: Sequence[str] = (),
    edges: Sequence[str] = (),
) -> Verdict:
    """Judge an engine by the noise floor.

    Args:
        measured: the engine's outputs against the fp64 reference; None when no engine could run
            here at all, and `emulated` is all there is.
        floor: eager in the engine's dtype against the same reference.
        where: hardware and software that the engine ran on.
        engine_ran: whether that is its target (the CPU provider computes fp16 in fp32: that is
            not).
        emulated: the program in true dtype arithmetic against the same reference; must pass too.
        problems: reasons to reject that were found elsewhere.
        edges: cases of unusual values that were compared elsewhere.

    Returns:
        A verdict whose reasons say in words why it was rejected, or else what a reader should know.
    """
    failures = [*problems, *floor.defects]
    accept, dtype = floor.accept, floor.dtype
    rounds: list[list[_Judged]] = []
    for prefix, comparison in ((f"in true {floor.dtype} arithmetic: ", emulated), ("", measured)):
        if comparison is None:
            continue
        names = output_names(floor.cases)
        same_dtype = engine_ran and not (floor.rounding or floor.estimated or floor.halves)
        judged = [_judge_output(comparison, floor, name, same_dtype) for name in names]
        found = [*_coverage_failures(comparison, floor), *(f for o in judged for f in o.failures)]
        failures += [_prefixed(prefix, reason) for reason in found]
        rounds.append(judged)
    if not rounds and not failures:
        failures.append("neither the engine nor the program was run")
    worst = [max(outputs, key=lambda o: o.ratio) for outputs in zip(*rounds, strict=True)]
    passed: Outcome = "verified" if engine_ran else "verified-by-emulation"
    noise = floor.noise
    failures, excesses = sort_out(reasons := failures, accept, dtype, noise)
    if failures and (option := way_out(reasons, dtype, noise)):
        failures += [f"output {name!r} is {NOISE}" for name in noise]
        failures.append(option)
    notes = [] if engine_ran else _where_notes(floor.dtype, where, measured, emulated)
    notes += _coverage_notes(worst)
    notes += _floor_notes(floor)
    return Verdict(
        outcome="rejected" if failures else passed,
        engine="ran" if engine_ran else "not run on target",
        where=where,
        outputs=tuple(_output_verdict(output) for output in worst),
        cases=(*floor.cases, *edges),
        errors=_errors_by_case(measured or emulated) if floor.rounding else {},
        reasons=tuple(failures or (*notes, *(f"accepted: {r}" for r in reasons))),
        excesses=excesses,
    )


def _prefixed(prefix: str, reason: str) -> str:
    text = prefix + reason
    return ExcessReason(text, reason.excess) if isinstance(reason, ExcessReason) else text


def _errors_by_case(comparison: Comparison | None) -> dict[str, float]:
    """The worst row of each case; cases with values that are not finite are left out."""
    worst = {
        case: max((found.worst_row for found in outputs.values()), default=0.0)
        for case, outputs in (comparison or {}).items()
    }
    return {case: error for case, error in worst.items() if math.isfinite(error)}


def verdict_line(verdict: Verdict, dtype: str) -> str:
    """One sentence for people: "verified: 1.1x the error of eager bf16".

    Args:
        dtype: of the floor that the verdict was reached with.
    """
    if verdict.outcome == "rejected":
        return f"rejected: {verdict.reasons[0]}"
    worst = max((o.ratio or 0.0 for o in verdict.outputs), default=0.0)
    text = f"{verdict.outcome}{described(verdict)}: {times(worst)} the error of eager {dtype}"
    text += KERNELS if any(output.kernels for output in verdict.outputs) else ""
    text += _prompts(verdict.outputs)
    return text if verdict.engine == "ran" else f"{text}; the engine has not run on its target"


def _prompts(outputs: Sequence[OutputVerdict]) -> str:
    """Agreement on prompts, as people who use embeddings read it."""
    followed = [o for o in outputs if o.prompts and o.cosine is not None]
    if not followed:
        return ""
    count = max(o.prompts for o in followed)
    least = min(o.cosine for o in followed if o.cosine is not None)
    shown = math.floor(least * 1e6) / 1e6  # never more than it is
    return f"; cosine at least {shown:.6f} for every token of all {count} prompts"


def _judge_output(measured: Comparison, floor: Floor, name: str, same_dtype: bool) -> _Judged:
    pooled = pool_output(measured, name)
    used, limit = floor.of(name), limit_of(floor)
    kernels = ratio(pooled.relative, used) > limit
    if kernels:
        used = floor.of(name, kernels=True)
    if pooled.wrong is not None:
        found = tuple(_wrong_values(measured, floor, name, kernels))
        return _Judged(name, pooled, used, LIMIT, found, kernels)
    excess = ratio(pooled.relative, used)
    failures: list[str] = []
    if pooled.nonfinite:
        failures.append(_nonfinite(name, measured))
    elif excess > limit:
        text = (
            f"output {name!r} has {times(excess)} the error of {floor.owner}"
            f"{KERNELS if floor.kernels else ''} (relative L2 {pooled.relative:.2g},"
            f" floor {used:.2g}, limit {times(limit)})"
        )
        found_in = Excess(output=name, error=pooled.relative, limit=limit * used)
        failures.append(ExcessReason(text, found_in))
    elif floor.max_error is not None and pooled.worst_row > floor.max_error:
        failures.append(
            f"output {name!r} has a row with a relative L2 error of {pooled.worst_row:.2g}, but the"
            f" plan allows {floor.max_error:.2g} (--max-error)"
        )
    elif same_dtype and excess < TOO_GOOD and _tells(used, floor.dtype):
        failures.append(
            f"output {name!r} has {times(excess)} the error of {floor.owner} (relative L2"
            f" {pooled.relative:.2g}, floor {used:.2g}): the noise floor does not fit this model"
        )
    failures += _row_failures(measured, floor, name)
    if not failures:
        failures += _part_failures(measured, floor, name)
    return _Judged(name, pooled, used, limit, tuple(failures), kernels)


def _tells(used: float, dtype: str) -> bool:
    """Whether a floor is so large that no engine has less error by luck, and still a measure."""
    return LARGE * UNIT_ROUNDOFF[dtype] < used <= LARGEST_FLOOR[dtype]


def _wrong_values(measured: Comparison, floor: Floor, name: str, kernels: bool) -> Iterator[str]:
    """Of integers and booleans it counts how many differ, over all cases and in each."""
    pooled, eager = pool_output(measured, name), pool_output(floor.cases, name)
    wrong, allowed = pooled.wrong or 0, LIMIT * floor.of(name, kernels=kernels)
    if wrong > allowed * pooled.rows:
        yield (
            f"output {name!r}: {wrong} of {pooled.rows} values differ from the reference"
            f" ({floor.owner}: {eager.wrong}, limit: {allowed * pooled.rows:.0f})"
        )
        return
    for case, outputs in measured.items():
        found, own = outputs.get(name), floor.cases.get(case, {}).get(name)
        if found is None or own is None or found.rows < FEW_VALUES:
            continue
        if found.relative > most_wrong(own.relative):
            yield (
                f"output {name!r}, case {case!r}: {found.wrong} of {found.rows} values differ"
                f" from the reference ({floor.owner}: {own.wrong})"
            )


def _part_failures(measured: Comparison, floor: Floor, name: str) -> Iterator[str]:
    """A channel of small values beside large ones moves neither the norm of a row nor of all."""
    for case, outputs in measured.items():
        part = outputs[name].part if name in outputs else None
        if part is not None and part.excess > 1:
            yield ExcessReason(
                f"output {name!r}, case {case!r}: {part.place} has a relative error of"
                f" {part.error:.2g}, limit {part.allowed:.2g} from the error of {floor.owner}"
                " there",
                Excess(output=name, case=case, error=part.error, limit=part.allowed),
            )


def _nonfinite(name: str, measured: Comparison) -> str:
    case, found = next((c, o[name]) for c, o in measured.items() if name in o and o[name].nonfinite)
    index = list(found.first_nonfinite or ())
    return (
        f"output {name!r}, case {case!r}: {found.nonfinite} values are not finite, first at {index}"
    )


def _row_failures(measured: Comparison, floor: Floor, name: str) -> Iterator[str]:
    """One wrong row among thousands hardly moves a pooled error."""
    used = floor.row_of(name, kernels=True)
    largest = math.inf if floor.is_lost(name) else LARGEST_ROW
    allowed = min(limit_of(floor) * ROW_LAXITY * used, largest)
    for case, outputs in measured.items():
        if name not in outputs or outputs[name].nonfinite:
            continue
        worst = outputs[name].worst_row
        if worst > allowed:
            place = outputs[name].worst_at
            at = f" (at {list(place)})" if place else ""
            yield ExcessReason(
                f"output {name!r}, case {case!r}: its worst row{at} has "
                f"{times(ratio(worst, used))} "
                f"the error of {floor.owner} in its worst row "
                f"(relative {worst:.2g}, floor {used:.2g}, limit {allowed:.2g})",
                Excess(output=name, case=case, error=worst, limit=allowed),
            )


def _coverage_failures(measured: Comparison, floor: Floor) -> Iterator[str]:
    """What was never compared cannot agree."""
    for case, outputs in floor.cases.items():
        missing = [name for name in outputs if name not in measured.get(case, {})]
        if missing:
            yield f"case {case!r}: nothing to compare for {', '.join(missing)}"


def _coverage_notes(outputs: Sequence[_Judged]) -> Iterator[str]:
    for output in outputs:
        if not output.pooled.rows:
            yield f"output {output.name!r} is empty in every case: only its sizes were compared"
        elif output.pooled.degenerate:
            yield (
                f"output {output.name!r}: the reference is {output.pooled.degenerate} in every"
                " case, which proves little"
            )


def _where_notes(
    dtype: str, where: Where, measured: Comparison | None, emulated: Comparison | None
) -> list[str]:
    notes = ["the engine has not run"]
    if measured is not None and where.provider:
        notes = [f"the engine ran on {where.provider}, which does not compute in {dtype}"]
    if emulated is not None:
        notes.append(f"the program was judged in true {dtype} arithmetic")
    return notes


def _floor_notes(floor: Floor) -> Iterator[str]:
    for name, error in floor.by_eager.items():
        off = (
            f"is off by {error:.2g}" if error <= BEYOND else "is infinite or NaN where fp64 is not"
        )
        yield (
            f"output {name!r}: eager fp32 {off}, so that the engine was compared with eager itself"
        )
    if floor.rounding:
        yield (
            f"eager {floor.label}: eager's own error and that of the plan's {floor.rounding}"
            " rounding, as it was simulated before the rewriting"
        )
    if floor.estimated:
        cause = floor.culprit or "values leave fp16's range"
        yield f"eager fp16 is not a measure ({cause}): an eighth of eager bf16's error is taken"


def _output_verdict(output: _Judged) -> OutputVerdict:
    pooled = output.pooled
    if pooled.nonfinite or not pooled.rows:  # there is no number to give
        return OutputVerdict(
            name=output.name, error=None, floor=output.floor, ratio=None, limit=output.limit
        )
    return OutputVerdict(
        name=output.name,
        error=pooled.relative + output.by_order,
        floor=output.floor + output.by_order,
        ratio=ratio(pooled.relative + output.by_order, output.floor + output.by_order),
        limit=output.limit,
        cosine=pooled.cosine,
        sqnr_db=pooled.sqnr_db if pooled.error_norm else None,
        max_abs=pooled.max_abs,
        pad_error=pooled.pad_error,
        prompts=pooled.prompts,
        prompt_cosine=pooled.prompt_cosine if pooled.prompts else None,
        kernels=output.kernels or output.by_order > 0,
    )
