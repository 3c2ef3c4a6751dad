"""Judges an engine: its error may be a few times the error that eager itself has in the same dtype,
and no more.

The tolerance is the noise floor times a limit, so a verdict reads "1.1x the error eager bf16 itself
has" and there is no constant to argue about.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from enginecast.runtime.bundle.manifest import Outcome, OutputVerdict, Verdict, Where
from enginecast.verify.floor import Floor, least_floor
from enginecast.verify.metrics import (
    Comparison,
    Metrics,
    output_names,
    pool_output,
    ratio,
    times,
)

LIMIT = 3.0
"""Error over floor, pooled over all cases.  Two correct orders of summation differ by less; a wrong
epsilon does not."""
QUANTIZED_LIMIT = 2.0
"""The same where the floor is mostly the rounding of a plan: its simulation and the engine round
the same values by the same scales, so their errors are nearer than those of two precisions."""
ROW_LAXITY = 2.0
"""A single worst row may exceed the pooled limit by this factor: extremes scatter more than
means."""
LARGEST_ROW = 0.9
"""No row may be off by more, whatever the floor: a row of zeros is off by 1."""


@dataclass(frozen=True)
class _Judged:
    """One output of one comparison."""

    name: str
    pooled: Metrics
    floor: float
    limit: float
    failures: tuple[str, ...]

    @property
    def ratio(self) -> float:
        return ratio(self.pooled.relative, self.floor)


def limit_of(floor: Floor) -> float:
    """How many times the floor a pooled error may be."""
    return QUANTIZED_LIMIT if floor.rounding else LIMIT


def judge(
    measured: Comparison | None,
    floor: Floor,
    *,
    where: Where,
    engine_ran: bool,
    emulated: Comparison | None = None,
    problems: Sequence[str] = (),
    edges: Mapping[str, bool] | None = None,
) -> Verdict:
    """Judge an engine by the noise floor.

    Args:
        measured: the engine's outputs against the fp64 reference; None when no engine could run
            here at all, and `emulated` is all there is.
        floor: eager in the engine's dtype against the same reference.
        where: on what the engine ran.
        engine_ran: whether that is its target (the CPU provider computes fp16 in fp32: that is
            not).
        emulated: the program in true dtype arithmetic against the same reference; must pass too.
        problems: reasons to reject that were found elsewhere.
        edges: cases of unusual values that were compared elsewhere, and whether agreement there
            says something (`verify.edges.proves`).

    Returns:
        A verdict whose reasons say in words why it was rejected, or else what a reader should know.
    """
    failures = [*problems, *floor.defects]
    rounds: list[list[_Judged]] = []
    for prefix, comparison in ((f"in true {floor.dtype} arithmetic: ", emulated), ("", measured)):
        if comparison is None:
            continue
        names = output_names(floor.cases)
        judged = [_judge_output(comparison, floor, name) for name in names]
        shown = edges is not None and any(edges.values())
        failures += [prefix + reason for reason in _coverage_failures(comparison, floor, shown)]
        failures += [prefix + reason for output in judged for reason in output.failures]
        rounds.append(judged)
    if not rounds and not failures:
        failures.append("neither the engine nor the program was run")
    worst = [max(outputs, key=lambda o: o.ratio) for outputs in zip(*rounds, strict=True)]
    passed: Outcome = "verified" if engine_ran else "verified-by-emulation"
    notes = [] if engine_ran else _where_notes(floor.dtype, where, measured, emulated)
    notes += [
        f"output {output.name!r}: the reference is {output.pooled.degenerate}, which proves little"
        for output in worst
        if output.pooled.degenerate
    ]
    notes += _floor_notes(floor)
    return Verdict(
        outcome="rejected" if failures else passed,
        engine="ran" if engine_ran else "not run on target",
        where=where,
        outputs=tuple(_output_verdict(output) for output in worst),
        cases=(*floor.cases, *(edges or ())),
        reasons=tuple(failures or notes),
    )


def verdict_line(verdict: Verdict, dtype: str) -> str:
    """One sentence for people: "verified: 1.1x the error eager bf16 itself has".

    Args:
        dtype: of the floor that the verdict was reached with.
    """
    if verdict.outcome == "rejected":
        return f"rejected: {verdict.reasons[0]}"
    worst = max((o.ratio or 0.0 for o in verdict.outputs), default=0.0)
    text = f"{verdict.outcome}: {times(worst)} the error eager {dtype} itself has"
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


def _judge_output(measured: Comparison, floor: Floor, name: str) -> _Judged:
    pooled = pool_output(measured, name)
    least = least_floor(floor.dtype)
    used = max(pool_output(floor.cases, name).relative, least)
    limit = limit_of(floor)
    excess = ratio(pooled.relative, used)
    failures: list[str] = []
    if pooled.nonfinite:
        failures.append(_nonfinite(name, measured))
    elif excess > limit:
        failures.append(
            f"output {name!r} has {times(excess)} the error {floor.owner} has "
            f"(relative L2 {pooled.relative:.2g}, floor {used:.2g}, limit {times(limit)})"
        )
    elif floor.max_error is not None and pooled.relative > floor.max_error:
        failures.append(
            f"output {name!r} has a relative L2 error of {pooled.relative:.2g}, and the plan allows"
            f" {floor.max_error:.2g} (--max-error)"
        )
    failures += _row_failures(measured, floor, name, used)
    return _Judged(name, pooled, used, limit, tuple(failures))


def _nonfinite(name: str, measured: Comparison) -> str:
    case, found = next((c, o[name]) for c, o in measured.items() if name in o and o[name].nonfinite)
    index = list(found.first_nonfinite or ())
    return (
        f"output {name!r}, case {case!r}: {found.nonfinite} values are not finite, first at {index}"
    )


def _row_failures(
    measured: Comparison, floor: Floor, name: str, pooled_floor: float
) -> Iterator[str]:
    """One wrong row among thousands hardly moves a pooled error.

    The floor is eager's worst row in any case: which row attention blows up is a matter of luck.
    """
    used = max(pool_output(floor.cases, name).worst_row, pooled_floor)
    allowed = min(limit_of(floor) * ROW_LAXITY * used, LARGEST_ROW)
    for case, outputs in measured.items():
        if name not in outputs or outputs[name].nonfinite:
            continue
        worst = outputs[name].worst_row
        if worst > allowed:
            place = outputs[name].worst_at
            at = f" (at {list(place)})" if place else ""
            yield (
                f"output {name!r}, case {case!r}: its worst row{at} has "
                f"{times(ratio(worst, used))} "
                f"the error {floor.owner} has in its worst row "
                f"(relative {worst:.2g}, floor {used:.2g}, limit {allowed:.2g})"
            )


def _coverage_failures(measured: Comparison, floor: Floor, shown: bool) -> Iterator[str]:
    """What was never compared cannot agree.

    Args:
        shown: whether other values than zeros were compared elsewhere.
    """
    for case, outputs in floor.cases.items():
        missing = [name for name in outputs if name not in measured.get(case, {})]
        if missing:
            yield f"case {case!r}: nothing to compare for {', '.join(missing)}"
    pooled = [pool_output(floor.cases, name) for name in output_names(floor.cases)]
    if shown:
        return
    if not any(m.rows for m in pooled):
        yield "no row was compared"
    elif all(m.degenerate == "all zero" for m in pooled if m.rows):
        yield "every output of the reference is all zero: agreement would prove nothing"


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
        error=pooled.relative,
        floor=output.floor,
        ratio=output.ratio,
        limit=output.limit,
        cosine=pooled.cosine,
        sqnr_db=pooled.sqnr_db if pooled.error_norm else None,
        max_abs=pooled.max_abs,
        pad_error=pooled.pad_error,
        prompts=pooled.prompts,
        prompt_cosine=pooled.prompt_cosine if pooled.prompts else None,
    )
