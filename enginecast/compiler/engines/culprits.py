"""Search for the cause of an error in a rewritten program, and run the passes again without it."""

from collections.abc import Sequence
from dataclasses import replace

from enginecast.compiler.engines.lower_and_run import criteria_of
from enginecast.compiler.engines.rewrite import Rewritten, rewrite
from enginecast.compiler.prepare.program import Prepared
from enginecast.compiler.request import EngineConfig
from enginecast.compiler.steps import Steps
from enginecast.passes.ir.base import Pass, SiteKey
from enginecast.passes.ir.pipeline import PassRun
from enginecast.verification.bisect.culprit import Bisection, Culprit, Leave, why_dropped
from enginecast.verification.bisect.search import Subject, bisect
from enginecast.verification.eager.outputs import Case
from enginecast.verification.reference import Reference

ROUNDS = 3
"""Most rounds of dropping guilty sites: a case that the search did not run may show others."""

WORST = 3
"""Cases that are searched with, if no single case need show the whole error."""


def without_culprits(
    prepared: Prepared,
    passes: tuple[Pass, ...],
    reference: Reference,
    rewritten: Rewritten,
    target: str,
    steps: Steps,
    engines: Sequence[EngineConfig] = (),
) -> Rewritten:
    """Run the passes again without the sites that cause the error, if that helps.

    An engine cannot do without the sites of lowering passes. If leaving sites out does not help,
    the result is the last, wrong program with its culprits.
    """
    dropped: tuple[Culprit, ...] = ()
    leave: Leave = ()
    for _ in range(ROUNDS):
        found = find_culprits(prepared, rewritten, steps, leave)
        in_lowering = any(culprit.position >= len(passes) for culprit in found.culprits)
        if in_lowering or not found.helps or not found.left_out:
            return replace(rewritten, bisection=found, dropped=dropped)
        leave, dropped = found.leave[: len(passes)], (*dropped, *found.culprits)
        steps.say(f"--drop-guilty leaves {found.left_out} of {found.rewritten} sites out")
        again = rewrite(prepared, passes, reference, steps, leave, target, engines)
        rewritten = replace(again, runs=_with_reasons(again.runs, dropped), dropped=dropped)
        if not is_wrong(rewritten):
            break
    return rewritten


def is_wrong(rewritten: Rewritten) -> bool:
    """Whether the program after its passes must be rejected, and eager is not the reason."""
    if rewritten.failures:
        return True
    if rewritten.emulated is None or rewritten.reference.floor.defects:
        return False
    return criteria_of(rewritten).judge().outcome == "rejected"


def find_culprits(
    prepared: Prepared, rewritten: Rewritten, steps: Steps, leave: Leave = ()
) -> Bisection:
    """Search a wrong program for its culprits; `leave`: sites that were already left out of it."""
    engine = rewritten.suspect
    runs = (*rewritten.runs, *(engine.runs if engine is not None else ()))
    checks = (*rewritten.checks, *(engine.checks if engine is not None else ()))
    if leave:
        leave = (*leave, *(frozenset[SiteKey]() for _ in runs[len(leave) :]))
    subject = Subject(
        program=prepared.captured.program,
        passes=tuple(run.pass_ for run in runs),
        reference=rewritten.reference,
        context=prepared.context,
        leave=leave,
        names=prepared.output_names,
    )
    with steps("bisect"):
        # The cases by the error of their outputs in emulated low precision, largest first.
        measured = rewritten.emulated.measured if rewritten.emulated is not None else {}

        def badness(case: Case) -> tuple[int, float]:
            outputs = measured.get(case.name, {}).values()
            lost = sum(found.nonfinite for found in outputs)
            return lost, max((found.relative for found in outputs), default=0.0)

        found = bisect(
            subject,
            checks,
            prepared.observed,
            sorted(prepared.cases, key=badness, reverse=True)[:WORST],
        )
    steps.log(f"bisect: {found.trials} runs")
    for line in found.lines():
        steps.log(line)
    return found


def _with_reasons(runs: Sequence[PassRun], dropped: Sequence[Culprit]) -> tuple[PassRun, ...]:
    """The sites that were dropped, each with the reason."""
    reasons = why_dropped(dropped)
    changed = []
    for position, run in enumerate(runs):
        found = ((site, reasons.get((position, site.key))) for site in run.sites)
        sites = tuple(site if why is None else replace(site, reason=why) for site, why in found)
        changed.append(replace(run, sites=sites))
    return tuple(changed)
