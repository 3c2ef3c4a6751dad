"""The commands that capture a model for an engine: export, and inspect, which only plans it."""

from pathlib import Path
from typing import Annotated

import typer

from enginecast.cli_options import (
    AllowCode,
    AllowUnverified,
    Also,
    Arch,
    AsJson,
    Device,
    DropGuilty,
    Dynamic,
    Fallback,
    HiddenStates,
    Inputs,
    MaxError,
    Model,
    Outputs,
    PipelineText,
    PlanFile,
    Precision,
    Prompts,
    Quiet,
    RandomWeights,
    SkipClasses,
    SkipPatterns,
    Target,
    Thorough,
    Threads,
    Verbose,
)
from enginecast.cli_tensorrt import (
    OptShapes,
    TrtHardware,
    TrtLevel,
    TrtRefit,
    TrtRoute,
    TrtStripWeights,
    TrtTimingCache,
    TrtVersionCompatible,
    TrtWorkspace,
    tensorrt_options,
)
from enginecast.terminal import progress, show_log


def export(
    model: Model,
    output: Annotated[Path, typer.Option("-o", "--output", metavar="DIR", help="New bundle.")],
    target: Target = "onnxruntime",
    precision: Precision = None,
    pipeline: PipelineText = None,
    skip_modules_pattern: SkipPatterns = None,
    skip_modules_classes: SkipClasses = None,
    inputs: Inputs = None,
    prompts: Prompts = None,
    dynamic: Dynamic = None,
    outputs: Outputs = None,
    hidden_state: HiddenStates = None,
    random_weights: RandomWeights = None,
    device: Device = None,
    arch: Arch = None,
    max_error: MaxError = None,
    plan: PlanFile = None,
    also: Also = None,
    trt_route: TrtRoute = None,
    opt_shape: OptShapes = None,
    trt_workspace: TrtWorkspace = None,
    trt_timing_cache: TrtTimingCache = None,
    trt_refit: TrtRefit = False,
    trt_strip_weights: TrtStripWeights = False,
    trt_version_compatible: TrtVersionCompatible = False,
    trt_hardware: TrtHardware = None,
    trt_level: TrtLevel = None,
    fallback: Fallback = "torchscript",
    allow_unverified_branches: AllowUnverified = False,
    threads: Threads = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a bundle that is there.")
    ] = False,
    drop_guilty: DropGuilty = False,
    thorough: Thorough = False,
    allow_code: AllowCode = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = 0,
) -> None:
    """Make an engine, compare it with eager, publish a bundle."""
    show_log(verbose)
    from enginecast.commands import run_export
    from enginecast.plan import make_plan
    from enginecast.prepare import ModelOptions

    build = tensorrt_options(
        trt_route,
        opt_shape,
        trt_workspace,
        trt_timing_cache,
        trt_refit,
        trt_strip_weights,
        trt_version_compatible,
        trt_hardware,
        trt_level,
    )
    skips = (tuple(skip_modules_pattern or ()), tuple(skip_modules_classes or ()))
    decided = make_plan(
        target,
        precision,
        pipeline,
        device,
        *skips,
        arch=arch,
        max_error=max_error,
        file=plan,
        tensorrt=build,
        also=tuple(also or ()),
    )
    dims, kept, states = (tuple(given or ()) for given in (dynamic, outputs, hidden_state))
    options = ModelOptions(
        random_weights, allow_code, inputs, prompts, dims, kept, states, thorough
    )
    raise typer.Exit(
        run_export(
            model,
            output,
            decided,
            options,
            fallback=fallback,
            allow_unverified=allow_unverified_branches,
            threads=threads,
            overwrite=overwrite,
            drop_guilty=drop_guilty,
            as_json=as_json,
            console=progress(quiet),
        )
    )


def inspect(
    model: Annotated[str, typer.Argument(metavar="MODEL|DIR", help="A model, or a bundle.")],
    target: Target = "onnxruntime",
    precision: Precision = None,
    pipeline: PipelineText = None,
    skip_modules_pattern: SkipPatterns = None,
    skip_modules_classes: SkipClasses = None,
    inputs: Inputs = None,
    prompts: Prompts = None,
    dynamic: Dynamic = None,
    outputs: Outputs = None,
    hidden_state: HiddenStates = None,
    random_weights: RandomWeights = None,
    device: Device = None,
    arch: Arch = None,
    max_error: MaxError = None,
    plan: PlanFile = None,
    save_plan: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the quantisation plan, to be edited and reused."),
    ] = None,
    trt_route: TrtRoute = None,
    opt_shape: OptShapes = None,
    fallback: Fallback = "torchscript",
    allow_code: AllowCode = False,
    as_json: AsJson = False,
) -> None:
    """Show the plan of an export, or what a bundle holds."""
    if (Path(model) / "manifest.json").is_file():
        from enginecast.commands_engine import show_bundle

        show_bundle(Path(model), as_json=as_json)
        return
    from enginecast.commands import run_inspect
    from enginecast.plan import make_plan
    from enginecast.prepare import ModelOptions

    skips = (tuple(skip_modules_pattern or ()), tuple(skip_modules_classes or ()))
    decided = make_plan(
        target,
        precision,
        pipeline,
        device,
        *skips,
        arch=arch,
        max_error=max_error,
        file=plan,
        tensorrt=tensorrt_options(trt_route, opt_shape),
    )
    dims, kept, states = (tuple(given or ()) for given in (dynamic, outputs, hidden_state))
    options = ModelOptions(random_weights, allow_code, inputs, prompts, dims, kept, states)
    run_inspect(
        model,
        decided,
        options,
        fallback=fallback,
        save_plan=save_plan,
        as_json=as_json,
        console=progress(),
    )
