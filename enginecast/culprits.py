"""What a rewrite that went wrong is asked for: its culprits, and a second try without them."""

from collections.abc import Sequence
from dataclasses import replace

from enginecast.passes.base import Pass, Site
from enginecast.passes.pipeline import PassRun
from enginecast.prepare import Prepared
from enginecast.rewrite import Rewritten, observed_cases, rewrite
from enginecast.steps import Steps
from enginecast.trial import by_emulation
from enginecast.verify.bisect import Subject, bisect
from enginecast.verify.culprit import Bisection, Culprit, Leave, why_dropped
from enginecast.verify.floor import Case
from enginecast.verify.reference import Reference
from enginecast.verify.verdict import floor_failures

ROUNDS = 3
"""Times that guilty sites are dropped: a case that the search did not run may show others."""

WORST = 3
"""Cases that are tried, when no single one of them may show what is wrong with all."""


def explained(
    prepared: Prepared,
    passes: tuple[Pass, ...],
    reference: Reference,
    steps: Steps,
    *,
    target: str = "onnxruntime",
    drop_guilty: bool = False,
) -> Rewritten:
    """Run the passes; where the result is wrong, say which sites or modules do harm.

    Args:
        target: of the export.
        drop_guilty: leave them out, where that helps, and verify the whole again.
    """
    rewritten = rewrite(prepared, passes, reference, steps, target=target)
    dropped: tuple[Culprit, ...] = ()
    leave: Leave = (frozenset(),) * len(passes)
    for _ in range(ROUNDS):
        if not is_wrong(rewritten):
            break
        found = find_culprits(prepared, passes, rewritten, steps, leave)
        if not drop_guilty or not found.helps or not found.left_out:
            rewritten = replace(rewritten, bisection=found)
            break
        leave, dropped = found.leave, (*dropped, *found.culprits)
        steps.say(f"--drop-guilty leaves {found.left_out} of {found.rewritten} sites out")
        again = rewrite(prepared, passes, reference, steps, leave, target)
        rewritten = replace(again, runs=_with_reasons(again.runs, dropped))
    return replace(rewritten, dropped=dropped)


def is_wrong(rewritten: Rewritten) -> bool:
    """Whether the program after its passes is to be rejected, and eager is not to blame."""
    if rewritten.failures:
        return True
    if rewritten.emulated is None or any(floor_failures(rewritten.reference.floor)):
        return False
    return by_emulation(rewritten, rewritten.problems).outcome == "rejected"


def find_culprits(
    prepared: Prepared,
    passes: tuple[Pass, ...],
    rewritten: Rewritten,
    steps: Steps,
    leave: Leave = (),
) -> Bisection:
    """Search a program that is wrong.

    Args:
        leave: sites that were left out of it.
    """
    subject = Subject(
        program=prepared.captured.program,
        passes=passes,
        floor=rewritten.reference.floor,
        context=prepared.context,
        leave=leave,
        names=prepared.output_names,
        mask_input=prepared.mask_input,
        masked=rewritten.reference.masked,
    )
    with steps("bisect"):
        found = bisect(
            subject, rewritten.checks, observed_cases(prepared), _worst_first(prepared, rewritten)
        )
    steps.log(f"bisect: {found.trials} runs")
    for line in found.lines():
        steps.log(line)
    return found


def _worst_first(prepared: Prepared, rewritten: Rewritten) -> Sequence[Case]:
    """The cases by how wrong the outputs are in true low precision."""
    measured = rewritten.emulated.measured if rewritten.emulated is not None else {}

    def badness(case: Case) -> tuple[int, float]:
        outputs = measured.get(case.name, {}).values()
        lost = sum(found.nonfinite for found in outputs)
        return lost, max((found.relative for found in outputs), default=0.0)

    return sorted(prepared.cases, key=badness, reverse=True)[:WORST]


def _with_reasons(runs: Sequence[PassRun], dropped: Sequence[Culprit]) -> tuple[PassRun, ...]:
    """The sites that were dropped with the reason for it."""
    reasons = why_dropped(dropped)

    def told(position: int, site: Site) -> Site:
        reason = reasons.get((position, site.key))
        return site if reason is None else replace(site, reason=reason)

    return tuple(
        replace(run, sites=tuple(told(position, site) for site in run.sites))
        for position, run in enumerate(runs)
    )
