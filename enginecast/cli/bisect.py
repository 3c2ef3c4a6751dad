"""`enginecast bisect`: the passes of an export alone, and what of them does harm."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
import typer
from rich.console import Console

from enginecast.cli.options.from_fields import AsJson, Download, Model, grouped, located
from enginecast.cli.terminal.output import (
    loading,
    print_json,
    progress,
    results,
    results_apart,
    say,
)
from enginecast.compiler.request import ExportRequest
from enginecast.errors import UsageError, VerificationError
from enginecast.verification.report.layout import print_table

if TYPE_CHECKING:
    from enginecast.verification.bisect.culprit import Bisection


@grouped
@results_apart()
def bisect(
    model: Model, request: ExportRequest, download: Download = False, as_json: AsJson = False
) -> None:
    """Find the pass and source line that lose accuracy.

    Also names the site of the pass and the module.
    """
    if request.pipeline is None and request.precision is None:
        raise UsageError("give --pipeline SPEC, or --precision NAME for its preset")
    request.check()
    model = located(model, download=download)
    loading()
    from enginecast.compiler.engines.culprits import find_culprits, is_wrong
    from enginecast.compiler.engines.lower_and_run import criteria_of
    from enginecast.compiler.engines.rewrite import rewrite
    from enginecast.compiler.prepare.open_model import open_model
    from enginecast.compiler.prepare.program import prepare
    from enginecast.compiler.prepare.reference import reference_of
    from enginecast.compiler.steps import Steps
    from enginecast.passes.registry import build
    from enginecast.verification.bisect.culprit import Bisection

    config, console = request.resolve(), progress()
    pipeline, steps = build(config.pipeline), Steps(console)
    prepared = prepare(open_model(model, request.options), request.options, steps)
    with steps("reference"):
        reference = reference_of(prepared, config.precision)
    rewritten = rewrite(prepared, pipeline, reference, steps)
    found: Bisection | None = None
    why: tuple[str, ...] = ()
    if is_wrong(rewritten):
        found = find_culprits(prepared, rewritten, steps)
        verdict = criteria_of(rewritten, *rewritten.failures).judge()
        why = tuple(dict.fromkeys(verdict.reasons))
    elif broken := list(rewritten.reference.floor.defects):
        raise VerificationError(
            f"no pass is to blame: {broken[0]}",
            hint="Eager is the measure; --precision bf16 and fp32 have the range for it.",
        )
    if as_json:
        shown = found or Bisection((), (), helps=False, trials=0)
        checks = msgspec.to_builtins(rewritten.checks)
        names = ("name", "promise", "rewritten", "failure")
        print_json(
            {
                "guilty": found is not None,
                "pipeline": config.pipeline,
                "precision": config.precision,
                "reasons": list(why),
                "lines": list(shown.lines()),
                **shown.to_json(),
                "passes": [{name: check[name] for name in names} for check in checks],
                "seconds": dict(steps.seconds),
            }
        )
    elif found is None:
        kept = ", ".join(check.name for check in rewritten.checks)
        results().print(f"nothing is guilty: {kept or 'no pass'} kept the promises", soft_wrap=True)
    else:
        _show(found, why, console)
    raise typer.Exit(0 if found is None else 1)


def _show(found: "Bisection", why: Sequence[str], console: Console) -> None:
    """What is named goes to standard output, the rest to where progress goes."""
    for reason in why:
        say(console, f"error: {reason}", "bold red")
    beyond = [error for error in found.modules if error.off]
    if beyond:
        rows = ((e.module, e.source, _times(e.accumulated), _times(e.isolated)) for e in beyond)
        print_table(console, ("module", "source", "error / floor", "isolated / floor"), rows)
    say(console, f"{len(found.modules) - len(beyond)} other modules are as they should be")
    for line in found.lines() or ("no pass, site or module could be singled out",):
        say(results(), line)
    if found.hint():
        say(console, found.hint())


def _times(value: float | None) -> str:
    from enginecast.verification.metrics import BEYOND, times

    if value is None:
        return "-"
    return "not finite" if value >= BEYOND else times(value)
