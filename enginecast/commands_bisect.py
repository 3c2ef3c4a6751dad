"""`enginecast bisect`: the passes of an export alone, and what of them does harm."""

from dataclasses import dataclass
from typing import Any

import msgspec
from rich.console import Console

from enginecast.commands_engine import print_json
from enginecast.culprits import find_culprits, is_wrong
from enginecast.errors import VerificationError
from enginecast.passes.pipeline import build
from enginecast.plan import Plan
from enginecast.prepare import ModelOptions, open_model, prepare, reference_of
from enginecast.rewrite import Rewritten, rewrite
from enginecast.steps import Steps
from enginecast.terminal import results, results_apart, say, table
from enginecast.trial import by_emulation
from enginecast.verify.culprit import Bisection
from enginecast.verify.metrics import BEYOND
from enginecast.verify.report_data import PassCheck
from enginecast.verify.verdict import floor_failures, times


@dataclass(frozen=True)
class Outcome:
    """What a bisection of a pipeline came to."""

    rewritten: Rewritten
    found: Bisection | None
    """None: nothing is guilty."""
    why: tuple[str, ...]
    """What is wrong, in the words of an export."""


@results_apart()
def run_bisect(
    model: str, plan: Plan, options: ModelOptions, *, as_json: bool, console: Console
) -> int:
    """Run a pipeline as an export does; return 1 when something of it does harm.

    Raises:
        VerificationError: eager itself is broken in this precision, so no pass is to blame.
    """
    passes = build(plan.pipeline)
    steps = Steps(console)
    prepared = prepare(open_model(model, options), options, steps)
    with steps("reference"):
        reference = reference_of(prepared, plan.precision)
    rewritten = rewrite(prepared, passes, reference, steps)
    found = None
    if is_wrong(rewritten):
        found = find_culprits(prepared, passes, rewritten, steps)
    elif broken := list(floor_failures(rewritten.reference.floor)):
        raise VerificationError(
            f"no pass is to blame: {broken[0]}",
            hint="Eager is the measure; --precision bf16 and fp32 have the range for it.",
        )
    outcome = Outcome(rewritten, found, _why(rewritten) if found is not None else ())
    if as_json:
        print_json(_as_json(outcome, plan, steps))
    else:
        _show(outcome, console)
    return 0 if found is None else 1


def _why(rewritten: Rewritten) -> tuple[str, ...]:
    verdict = by_emulation(rewritten, (*rewritten.failures, *rewritten.problems))
    return tuple(dict.fromkeys(verdict.reasons))


def _show(outcome: Outcome, console: Console) -> None:
    """What is named goes to standard output, the rest to where progress goes."""
    found = outcome.found
    if found is None:
        passes = ", ".join(check.name for check in outcome.rewritten.checks)
        results().print(
            f"nothing is guilty: {passes or 'no pass'} kept the promises", soft_wrap=True
        )
        return
    for reason in outcome.why:
        say(console, f"error: {reason}", "bold red")
    shown = table("module", "source", "error / floor", "isolated / floor")
    beyond = [error for error in found.modules if error.off]
    for error in beyond:
        isolated = "-" if error.isolated is None else _times(error.isolated)
        shown.add_row(error.module, error.source, _times(error.accumulated), isolated)
    if beyond:
        console.print(shown)
    say(console, f"{len(found.modules) - len(beyond)} other modules are as they should be")
    for line in found.lines() or ("no pass, site or module could be told apart",):
        say(results(), line)
    if found.hint():
        say(console, found.hint())


def _times(value: float) -> str:
    return "not finite" if value >= BEYOND else times(value)


def _as_json(outcome: Outcome, plan: Plan, steps: Steps) -> dict[str, Any]:
    found = outcome.found or Bisection((), (), helps=False, trials=0)
    return {
        "guilty": outcome.found is not None,
        "pipeline": plan.pipeline,
        "precision": plan.precision,
        "reasons": list(outcome.why),
        "lines": list(found.lines()),
        **found.to_json(),
        "passes": [_check(check) for check in outcome.rewritten.checks],
        "seconds": dict(steps.seconds),
    }


def _check(check: PassCheck) -> dict[str, Any]:
    content: dict[str, Any] = msgspec.to_builtins(check)
    return {name: content[name] for name in ("name", "promise", "rewritten", "failure")}
