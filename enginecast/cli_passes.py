"""The commands of pass development: opt, bisect and passes."""

from pathlib import Path
from typing import Annotated

import typer

from enginecast.cli_options import (
    AllowCode,
    AsJson,
    Device,
    Dynamic,
    HiddenStates,
    Inputs,
    Model,
    Outputs,
    PipelineText,
    Precision,
    Prompts,
    RandomWeights,
    SkipClasses,
    SkipPatterns,
    require_folder,
)
from enginecast.errors import UsageError
from enginecast.terminal import progress


def opt(
    model: Model,
    pipeline: Annotated[str, typer.Option("--pipeline", metavar="SPEC", help="Passes to run.")],
    print_ir: Annotated[bool, typer.Option("--print-ir", help="Print the program.")] = False,
    print_diff: Annotated[bool, typer.Option("--print-diff", help="Print each change.")] = False,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="OUT.pt2", help="Save the program.")
    ] = None,
    inputs: Inputs = None,
    prompts: Prompts = None,
    dynamic: Dynamic = None,
    outputs: Outputs = None,
    hidden_state: HiddenStates = None,
    random_weights: RandomWeights = None,
    allow_code: AllowCode = False,
    as_json: AsJson = False,
) -> None:
    """Run passes alone, with a check after each."""
    if output is not None:
        require_folder(output)
        if output.suffix != ".pt2":
            raise UsageError(f"-o {output}: expected a name that ends in .pt2")
    from enginecast.commands_opt import run_opt
    from enginecast.prepare import ModelOptions

    dims, kept, states = (tuple(given or ()) for given in (dynamic, outputs, hidden_state))
    options = ModelOptions(random_weights, allow_code, inputs, prompts, dims, kept, states)
    raise typer.Exit(
        run_opt(
            model,
            pipeline,
            options,
            print_ir=print_ir,
            print_diff=print_diff,
            output=output,
            as_json=as_json,
            console=progress(),
        )
    )


def bisect(
    model: Model,
    pipeline: PipelineText = None,
    precision: Precision = None,
    skip_modules_pattern: SkipPatterns = None,
    skip_modules_classes: SkipClasses = None,
    inputs: Inputs = None,
    prompts: Prompts = None,
    dynamic: Dynamic = None,
    outputs: Outputs = None,
    hidden_state: HiddenStates = None,
    random_weights: RandomWeights = None,
    device: Device = None,
    allow_code: AllowCode = False,
    as_json: AsJson = False,
) -> None:
    """Name the pass, site, module and source line where accuracy is lost."""
    if pipeline is None and precision is None:
        raise UsageError("give --pipeline SPEC, or --precision NAME for its preset")
    from enginecast.commands_bisect import run_bisect
    from enginecast.plan import make_plan
    from enginecast.prepare import ModelOptions

    kept = (tuple(skip_modules_pattern or ()), tuple(skip_modules_classes or ()))
    plan = make_plan("onnxruntime", precision, pipeline, device, *kept)
    dims, wanted, states = (tuple(given or ()) for given in (dynamic, outputs, hidden_state))
    options = ModelOptions(random_weights, allow_code, inputs, prompts, dims, wanted, states)
    raise typer.Exit(run_bisect(model, plan, options, as_json=as_json, console=progress()))


def passes(as_json: AsJson = False) -> None:
    """List the passes with their options."""
    from enginecast.commands import list_passes

    list_passes(as_json=as_json)
