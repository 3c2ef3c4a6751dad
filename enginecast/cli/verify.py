"""`enginecast verify`: compare a bundle with eager again.  It needs torch only for `--model`."""

from typing import Annotated

import msgspec
import typer

from enginecast.cli.options.from_fields import (
    AsJson,
    Download,
    Dynamic,
    Inputs,
    RandomWeights,
    RunFlags,
    Values,
    grouped,
    located,
    refuse_given,
)
from enginecast.cli.options.pipeline_folders import EnginesDir, of_pipelines
from enginecast.cli.terminal.output import print_json, results, results_apart, say

OF_MODEL = {"random_weights", "download", "inputs", "dynamic", "values"}


@grouped
@results_apart()
@of_pipelines(alone=("inputs", "dynamic", "values"))
def verify(
    context: typer.Context,
    bundle: EnginesDir,
    how: RunFlags,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL", help="Compare with this model instead of the stored reference."
        ),
    ] = None,
    random_weights: RandomWeights = None,
    download: Download = False,
    inputs: Inputs = None,
    dynamic: Dynamic = None,
    values: Values = None,
    as_json: AsJson = False,
) -> None:
    """Compare a bundle with eager again, on this machine's hardware."""
    from enginecast.compiler.request import ModelOptions
    from enginecast.compiler.verify.bundle import verify_bundle
    from enginecast.verification.report.tables import print_verdict

    if model is None:
        refuse_given(
            context, OF_MODEL, "only with --model MODEL", hint="Give it, or leave them out."
        )
    else:
        ModelOptions(inputs=inputs, dynamic=dynamic or (), values=values or ()).check()
        model = located(model, download=download)
    check = verify_bundle(
        bundle,
        model=model,
        random_weights=random_weights,
        inputs=inputs,
        dynamic=dynamic or (),
        values=values or (),
        **how.arguments(),
    )
    verdict = check.verdict
    if as_json:
        content = msgspec.to_builtins(check) | {
            "outcome": verdict.outcome,
            "engine": verdict.engine,
        }
        del content["floor_dtype"]
        print_json(content)
    else:
        console = results()
        print_verdict(verdict, check.floor_dtype, console)
        say(console, f"compared with {check.against}, run by {check.backend}")
        for line in check.layers:
            say(console, line)
        if check.completed:
            say(console, "the bundle's verdict by emulation is now one of the engine itself")
        for note in check.notes:
            say(console, note)
    raise typer.Exit(1 if verdict.outcome == "rejected" else 0)
