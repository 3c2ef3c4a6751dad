"""The command line: a thin skin over the Python API.  Results go to stdout, progress to stderr."""

import json
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console

from enginecast import __version__
from enginecast.cli_errors import BadCommandLine, crash, fail, show_warning, usage_error
from enginecast.cli_options import (
    AllowCode,
    AllowUnverified,
    Arch,
    AsJson,
    BundleDir,
    Device,
    DropGuilty,
    Dynamic,
    Fallback,
    HiddenStates,
    Inputs,
    MaxError,
    Model,
    OtherModel,
    Outputs,
    PipelineText,
    PlanFile,
    Precision,
    Prompts,
    Provider,
    Quiet,
    RandomWeights,
    SkipClasses,
    SkipPatterns,
    Target,
    Thorough,
    Threads,
    Verbose,
    require_folder,
)
from enginecast.cli_passes import bisect, opt, passes
from enginecast.errors import EnginecastError, UsageError
from enginecast.terminal import progress, show_log

app = typer.Typer(
    name="enginecast",
    help="Turn PyTorch models into engines that were compared with eager.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # its tables cut the names of options
    context_settings={"help_option_names": ["-h", "--help"]},
)

INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run a command and leave with its exit code; every error becomes one message.

    Args:
        arguments: of the command line; None: this process's own.
    """
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    warnings.showwarning = show_warning
    as_json = "--json" in arguments
    try:
        code = app(args=arguments, prog_name="enginecast", standalone_mode=False)
    except EnginecastError as error:
        code = fail(error, as_json=as_json)
    except BadCommandLine as error:
        code = fail(usage_error(error, arguments, app), as_json=as_json)
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    except Exception:  # whatever is left is a defect of ours
        code = crash()
    if code == INTERRUPTED:
        print("interrupted", file=sys.stderr)
    sys.exit(code or 0)


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        print(f"enginecast {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help(), file=sys.stderr)
        raise typer.Exit(UsageError.exit_code)


@app.command()
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

    raise typer.Exit(
        run_export(
            model,
            output,
            target=target,
            precision=precision,
            pipeline=pipeline,
            skip_patterns=tuple(skip_modules_pattern or ()),
            skip_classes=tuple(skip_modules_classes or ()),
            inputs=inputs,
            prompts=prompts,
            dynamic=tuple(dynamic or ()),
            outputs=tuple(outputs or ()),
            hidden_states=tuple(hidden_state or ()),
            random_weights=random_weights,
            device=device,
            arch=arch,
            max_error=max_error,
            plan_file=plan,
            fallback=fallback,
            allow_unverified=allow_unverified_branches,
            threads=threads,
            overwrite=overwrite,
            drop_guilty=drop_guilty,
            thorough=thorough,
            allow_code=allow_code,
            as_json=as_json,
            console=progress(quiet),
        )
    )


@app.command()
def verify(
    bundle: BundleDir,
    model: OtherModel = None,
    device: Device = None,
    provider: Provider = None,
    random_weights: RandomWeights = None,
    threads: Threads = None,
    allow_code: AllowCode = False,
    as_json: AsJson = False,
) -> None:
    """Compare a bundle with eager again, on this machine's hardware."""
    from enginecast.commands_engine import run_verify

    raise typer.Exit(
        run_verify(
            bundle,
            model=model,
            device=device or "cpu",
            providers=provider,
            random_weights=random_weights,
            threads=threads,
            allow_code=allow_code,
            as_json=as_json,
        )
    )


@app.command()
def run(
    bundle: BundleDir,
    output: Annotated[Path, typer.Option("-o", "--output", metavar="FILE", help="safetensors.")],
    inputs: Inputs = None,
    prompts: Prompts = None,
    device: Device = None,
    provider: Provider = None,
    threads: Threads = None,
    allow_code: AllowCode = False,
    as_json: AsJson = False,
) -> None:
    """Load an engine and run it; needs no torch."""
    if (inputs is None) == (prompts is None):
        raise UsageError("give either --inputs FILE.safetensors or --prompts FILE.txt")
    require_folder(output)
    from enginecast.commands_engine import run_engine

    run_engine(
        bundle,
        output,
        inputs=inputs,
        prompts=prompts,
        device=device or "cpu",
        providers=provider,
        threads=threads,
        allow_code=allow_code,
        as_json=as_json,
    )


@app.command()
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
        target, precision, pipeline, device, *skips, arch=arch, max_error=max_error, file=plan
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


for command in (opt, bisect, passes):
    app.command()(command)


@app.command()
def doctor(as_json: AsJson = False) -> None:
    """Versions, providers, GPU; what is missing and how to get it."""
    from enginecast.doctor import examine, show

    report = examine()
    if as_json:
        print(json.dumps(report.to_json(), indent=1))
    else:
        show(report, Console(emoji=False))
