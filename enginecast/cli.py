"""The command line: a thin skin over the Python API.  Results go to stdout, progress to stderr."""

import json
import logging
import sys
import warnings
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console

from enginecast import __version__
from enginecast.cli_options import (
    AllowCode,
    AsJson,
    BundleDir,
    Device,
    Dynamic,
    Inputs,
    Model,
    PipelineText,
    Precision,
    Prompts,
    Provider,
    Quiet,
    RandomWeights,
    Threads,
    Verbose,
)
from enginecast.errors import EnginecastError, UsageError

app = typer.Typer(
    name="enginecast",
    help="Turn PyTorch models into engines that were compared with eager.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

WIDTH_OF_LOGS = 120
"""Columns of tables where nobody has a terminal: module paths should not wrap."""


def main() -> None:
    """Run the command; every error of ours becomes one message and its exit code."""
    warnings.showwarning = _show_warning
    try:
        app()
    except EnginecastError as error:
        _fail(error)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)


def _fail(error: EnginecastError) -> NoReturn:
    console = Console(stderr=True)
    console.print(f"error: {error.message}", style="bold red", markup=False, highlight=False)
    if error.hint:
        console.print(error.hint, markup=False, highlight=False)
    if "--json" in sys.argv:
        kind = type(error).__name__
        print(json.dumps({"error": kind, "message": error.message, "hint": error.hint}, indent=1))
    sys.exit(error.exit_code)


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    print(f"warning: {message}", file=sys.stderr)


def _stderr(quiet: bool = False) -> Console:
    console = Console(stderr=True, quiet=quiet)
    if not console.is_terminal:
        console.width = WIDTH_OF_LOGS
    return console


def _logging(verbose: int) -> None:
    if verbose:
        level = logging.DEBUG if verbose > 1 else logging.INFO
        logging.basicConfig(stream=sys.stderr, level=level, format="%(name)s: %(message)s")


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        print(f"enginecast {__version__}")
        raise typer.Exit


@app.command()
def export(
    model: Model,
    output: Annotated[Path, typer.Option("-o", "--output", metavar="DIR", help="New bundle.")],
    target: Annotated[str, typer.Option(help="onnxruntime.")] = "onnxruntime",
    precision: Precision = None,
    pipeline: PipelineText = None,
    skip_modules_pattern: Annotated[
        list[str] | None, typer.Option(metavar="RE", help="Modules that stay in fp32.")
    ] = None,
    skip_modules_classes: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Classes that stay in fp32.")
    ] = None,
    inputs: Inputs = None,
    prompts: Prompts = None,
    dynamic: Dynamic = None,
    random_weights: RandomWeights = None,
    device: Device = None,
    arch: Annotated[str | None, typer.Option(help="GPU architecture, such as sm90.")] = None,
    fallback: Annotated[
        str, typer.Option(help="none, rewrite, specialise or torchscript.")
    ] = "torchscript",
    threads: Threads = None,
    overwrite: Annotated[bool, typer.Option(help="Replace a bundle that is there.")] = False,
    allow_code: AllowCode = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = 0,
) -> None:
    """Capture, rewrite, lower, compare with eager, and publish a bundle."""
    _logging(verbose)
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
            random_weights=random_weights,
            device=device,
            arch=arch,
            fallback=fallback,
            threads=threads,
            overwrite=overwrite,
            allow_code=allow_code,
            as_json=as_json,
            console=_stderr(quiet),
        )
    )


@app.command()
def verify(
    bundle: BundleDir,
    model: Annotated[
        str | None, typer.Option(metavar="MODEL", help="Compare with this model, not the stored")
    ] = None,
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
    precision: Precision = None,
    pipeline: PipelineText = None,
    inputs: Inputs = None,
    dynamic: Dynamic = None,
    random_weights: RandomWeights = None,
    device: Device = None,
    allow_code: AllowCode = False,
    as_json: AsJson = False,
) -> None:
    """Tell what an export would do, without building; or what a bundle holds."""
    if (Path(model) / "manifest.json").is_file():
        from enginecast.commands_engine import show_bundle

        show_bundle(Path(model), as_json=as_json)
        return
    from enginecast.commands import run_inspect

    run_inspect(
        model,
        precision=precision,
        pipeline=pipeline,
        inputs=inputs,
        dynamic=tuple(dynamic or ()),
        random_weights=random_weights,
        device=device,
        allow_code=allow_code,
        as_json=as_json,
        console=_stderr(),
    )


@app.command()
def opt(
    model: Model,
    pipeline: Annotated[str, typer.Option("--pipeline", metavar="SPEC", help="Passes to run.")],
    print_ir: Annotated[bool, typer.Option("--print-ir", help="Print the program.")] = False,
    print_diff: Annotated[bool, typer.Option("--print-diff", help="Print each change.")] = False,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="OUT.pt2", help="Save the program.")
    ] = None,
    inputs: Inputs = None,
    dynamic: Dynamic = None,
    random_weights: RandomWeights = None,
    allow_code: AllowCode = False,
    as_json: AsJson = False,
) -> None:
    """Run passes alone, with a numeric check after each: for writing passes."""
    from enginecast.commands import run_opt

    raise typer.Exit(
        run_opt(
            model,
            pipeline,
            print_ir=print_ir,
            print_diff=print_diff,
            output=output,
            inputs=inputs,
            dynamic=tuple(dynamic or ()),
            random_weights=random_weights,
            allow_code=allow_code,
            as_json=as_json,
            console=_stderr(),
        )
    )


@app.command()
def passes(as_json: AsJson = False) -> None:
    """List the passes with their options."""
    from enginecast.commands import list_passes

    list_passes(as_json=as_json)


@app.command()
def doctor(as_json: AsJson = False) -> None:
    """Versions, providers, GPU; what is missing and how to get it."""
    from enginecast.doctor import examine, show

    report = examine()
    if as_json:
        print(json.dumps(report.to_json(), indent=1))
    else:
        show(report, Console())
