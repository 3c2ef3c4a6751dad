"""Judge an engine: its error may be at most a few times eager's own error in the same dtype.

The tolerance is the noise floor times a limit, so a verdict reads "1.1x the error of eager bf16"
and there is no constant to argue about.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec

from enginecast.runtime.bundle.manifest import Excess, Outcome, OutputVerdict, Verdict, Where
from enginecast.verification.accepted_excess import (
    ExcessReason,
    described,
    placed,
    sort_out,
    way_out,
)
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
from enginecast.verification.reference import GIVEN_PROMPTS

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
    given: Metrics | None = None
    """Of the prompts that a user gave."""

    @property
    def ratio(self) -> float:
        return ratio(self.pooled.relative, self.floor)

    @property
    def by_order(self) -> float:
        """The part of the error that another order of sums explains."""
        if self.pooled.wrong is not None:
            return 0.0
        distance = ratio(self.pooled.distance, self.pooled.reference_norm)
        return max(distance - self.pooled.relative, 0.0)

    @property
    def verdict(self) -> OutputVerdict:
        pooled, given = self.pooled, self.given
        errors = () if given is None else given.prompt_errors
        cosines = () if given is None else given.prompt_cosines
        if pooled.nonfinite or not pooled.rows:  # there is no number to give
            return OutputVerdict(
                name=self.name,
                error=None,
                floor=self.floor,
                ratio=None,
                limit=self.limit,
                prompt_errors=errors,
                prompt_cosines=cosines,
            )
        error, floor = pooled.relative + self.by_order, self.floor + self.by_order
        return OutputVerdict(
            name=self.name,
            error=error,
            floor=floor,
            ratio=ratio(error, floor),
            limit=self.limit,
            # Integers and booleans are counted where they differ: none of them has a direction.
            cosine=pooled.cosine if pooled.wrong is None else None,
            sqnr_db=pooled.sqnr_db if pooled.error_norm and pooled.wrong is None else None,
            max_abs=pooled.max_abs,
            pad_error=pooled.pad_error,
            prompts=pooled.prompts,
            prompt_cosine=pooled.prompt_cosine if pooled.prompts else None,
            prompt_errors=errors,
            prompt_cosines=cosines,
            kernels=self.kernels or self.by_order > 0,
        )


def limit_of(floor: Floor) -> float:
    """The largest allowed ratio of a pooled error to the floor."""
    return QUANTIZED_LIMIT if floor.rounding else LIMIT


def noted(verdict: Verdict, notes: Sequence[str]) -> Verdict:
    """A verdict with what a reader should know besides; unless it was rejected."""
    if verdict.outcome == "rejected":
        return verdict
    return msgspec.structs.replace(verdict, reasons=(*verdict.reasons, *notes))


def row_limit(floor: Floor, name: str) -> float:
    """The largest allowed relative error of a row of an output."""
    largest = math.inf if floor.is_lost(name) else LARGEST_ROW
    return min(limit_of(floor) * ROW_LAXITY * floor.row_of(name, kernels=True), largest)


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
        edges: cases that were compared elsewhere, such as those of unusual values.

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
        for case, outputs in floor.cases.items():  # what was never compared cannot agree
            missing = [name for name in outputs if name not in comparison.get(case, {})]
            if missing:
                lacking = f"case {case!r}: nothing to compare for {', '.join(missing)}"
                failures.append(placed(prefix, lacking))
        judged = [_judge_output(comparison, floor, name, same_dtype) for name in names]
        failures += [placed(prefix, reason) for output in judged for reason in output.failures]
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
    notes = []
    if not engine_ran and measured is not None and where.provider:
        notes.append(f"the engine ran on {where.provider}, which does not compute in {dtype}")
    elif not engine_ran:
        notes.append("the engine has not run")
    if not engine_ran and emulated is not None:
        notes.append(f"the program was judged in true {dtype} arithmetic")
    for output in worst:
        if not output.pooled.rows:
            notes.append(
                f"output {output.name!r} is empty in every case: only its sizes were compared"
            )
        elif output.pooled.degenerate:
            notes.append(
                f"output {output.name!r}: the reference is {output.pooled.degenerate} in every"
                " case, which proves little"
            )
    notes += _floor_notes(floor)
    # The worst row of each case, as far as it is finite.
    errors = {
        case: max((found.worst_row for found in outputs.values()), default=0.0)
        for case, outputs in ((measured or emulated or {}) if floor.rounding else {}).items()
    }
    return Verdict(
        outcome="rejected" if failures else passed,
        engine="ran" if engine_ran else "not run on target",
        where=where,
        outputs=tuple(output.verdict for output in worst),
        cases=(*floor.cases, *edges),
        errors={case: error for case, error in errors.items() if math.isfinite(error)},
        max_error=None if floor.rounding else floor.max_error,
        reasons=tuple(failures or (*notes, *(f"accepted: {r}" for r in reasons))),
        excesses=excesses,
    )


def verdict_line(verdict: Verdict, dtype: str, but: str = "") -> str:
    """One sentence for people: "verified: 1.1x the error of eager bf16".

    Args:
        dtype: of the floor that the verdict was reached with.
        but: what to say in the same breath: "slower than fp32".
    """
    if verdict.outcome == "rejected":
        return f"rejected: {verdict.reasons[0]}"
    worst = max((o.ratio or 0.0 for o in verdict.outputs), default=0.0)
    outcome = f"{verdict.outcome}{described(verdict)}{f', but {but}' if but else ''}"
    text = f"{outcome}: {times(worst)} the error of eager {dtype}"
    text += KERNELS if any(output.kernels for output in verdict.outputs) else ""
    followed = [o for o in verdict.outputs if o.prompts and o.cosine is not None]
    if followed:  # agreement on prompts, as people who use embeddings read it
        least = min(o.cosine for o in followed if o.cosine is not None)
        text += (
            f"; cosine at least {math.floor(least * 1e6) / 1e6:.6f} for every token of all"
            f" {max(o.prompts for o in followed)} prompts"  # the cosine is never more than it is
        )
    return text if verdict.engine == "ran" else f"{text}; the engine has not run on its target"


def _judge_output(measured: Comparison, floor: Floor, name: str, same_dtype: bool) -> _Judged:
    """All criteria of one output: first those over all cases, then those of each case."""
    pooled, eager = pool_output(measured, name), pool_output(floor.cases, name)
    used, limit = floor.of(name), limit_of(floor)
    kernels = ratio(pooled.relative, used) > limit
    if kernels:
        used = floor.of(name, kernels=True)
    cases = {case: outputs[name] for case, outputs in measured.items() if name in outputs}
    excess, failures = ratio(pooled.relative, used), list[str]()

    if pooled.wrong is not None:  # how many integers or booleans differ
        allowed = LIMIT * floor.of(name, kernels=kernels) * pooled.rows
        if pooled.wrong > allowed:
            failures.append(
                f"output {name!r}: {pooled.wrong} of {pooled.rows} values differ from the reference"
                f" ({floor.owner}: {eager.wrong}, limit: {allowed:.0f})"
            )
            return _Judged(name, pooled, used, LIMIT, tuple(failures), kernels)
        for case, found in cases.items():
            own = floor.cases.get(case, {}).get(name)
            if own is None or found.rows < FEW_VALUES:
                continue
            if found.relative > most_wrong(own.relative):
                failures.append(
                    f"output {name!r}, case {case!r}: {found.wrong} of {found.rows} values differ"
                    f" from the reference ({floor.owner}: {own.wrong})"
                )
        return _Judged(name, pooled, used, LIMIT, tuple(failures), kernels)

    # A floor that is so large that no engine has less error by luck, and still a measure.
    tells = LARGE * UNIT_ROUNDOFF[floor.dtype] < used <= LARGEST_FLOOR[floor.dtype]
    if pooled.nonfinite:
        case, found = next((case, found) for case, found in cases.items() if found.nonfinite)
        failures.append(
            f"output {name!r}, case {case!r}: {found.nonfinite} values are not finite, first at"
            f" {list(found.first_nonfinite or ())}"
        )
    elif excess > limit:
        text = (
            f"output {name!r} has {times(excess)} the error of {floor.owner}"
            f"{KERNELS if floor.kernels else ''} (relative L2 {pooled.relative:.2g},"
            f" floor {used:.2g}, limit {times(limit)})"
        )
        of = Excess(output=name, error=pooled.relative, limit=limit * used)
        failures.append(ExcessReason(text, of))
    elif floor.max_error is not None and pooled.worst_row > floor.max_error:
        failures.append(
            f"output {name!r} has a row with a relative L2 error of {pooled.worst_row:.2g}, but"
            f" {'the plan' if floor.rounding else '--max-error'} allows {floor.max_error:.2g}"
        )
    elif same_dtype and excess < TOO_GOOD and tells:
        failures.append(
            f"output {name!r} has {times(excess)} the error of {floor.owner} (relative L2"
            f" {pooled.relative:.2g}, floor {used:.2g}): the noise floor does not fit this model"
        )

    # One wrong row among thousands hardly moves a pooled error.
    of_rows, allowed = floor.row_of(name, kernels=True), row_limit(floor, name)
    for case, found in cases.items():
        worst = found.worst_row
        if found.nonfinite or worst <= allowed:
            continue
        at = f" (at {list(found.worst_at)})" if found.worst_at else ""
        text = (
            f"output {name!r}, case {case!r}: its worst row{at} has"
            f" {times(ratio(worst, of_rows))} the error of {floor.owner} in its worst row"
            f" (relative {worst:.2g}, floor {of_rows:.2g}, limit {allowed:.2g})"
        )
        of = Excess(output=name, case=case, error=worst, limit=allowed)
        failures.append(ExcessReason(text, of))

    # A channel of small values beside large ones moves neither the norm of a row nor of all.
    parts = {case: found.part for case, found in cases.items() if found.part and not failures}
    for case, part in parts.items():
        if part.excess > 1:
            text = (
                f"output {name!r}, case {case!r}: {part.place} has a relative error of"
                f" {part.error:.2g}, limit {part.allowed:.2g} from the error of {floor.owner} there"
            )
            of = Excess(output=name, case=case, error=part.error, limit=part.allowed)
            failures.append(ExcessReason(text, of))
    given = cases.get(GIVEN_PROMPTS)
    return _Judged(name, pooled, used, limit, tuple(failures), kernels, given)


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
    if floor.autocast:
        yield (
            f"eager does not run in {floor.dtype} as a whole: its error is that under"
            f" torch.autocast, with weights in fp32"
        )
    if floor.estimated:
        cause = floor.culprit or "values leave fp16's range"
        yield f"eager fp16 is not a measure ({cause}): an eighth of eager bf16's error is taken"
