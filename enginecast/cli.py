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
from enginecast.cli_cache import app as cache_app
from enginecast.cli_errors import BadCommandLine, crash, fail, show_warning, usage_error
from enginecast.cli_export import export, inspect
from enginecast.cli_options import (
    AllowCode,
    AsJson,
    BundleDir,
    Device,
    Inputs,
    OtherModel,
    Prefer,
    Prompts,
    Provider,
    RandomWeights,
    Threads,
    require_folder,
)
from enginecast.cli_passes import bisect, opt, passes
from enginecast.errors import EnginecastError, UsageError

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
        code = fail(usage_error(error), as_json=as_json)
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
def verify(
    bundle: BundleDir,
    model: OtherModel = None,
    device: Device = None,
    provider: Provider = None,
    prefer: Prefer = None,
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
            device=device,
            providers=provider,
            prefer=prefer,
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
    prefer: Prefer = None,
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
        device=device,
        providers=provider,
        prefer=prefer,
        threads=threads,
        allow_code=allow_code,
        as_json=as_json,
    )


for command in (export, inspect, opt, bisect, passes):
    app.command()(command)
app.add_typer(cache_app, name="cache")


@app.command()
def doctor(as_json: AsJson = False) -> None:
    """Versions, providers, GPU; what is missing and how to get it."""
    from enginecast.doctor import examine
    from enginecast.doctor_page import show

    report = examine(tensorrt=True)
    if as_json:
        print(json.dumps(report.to_json(), indent=1))
    else:
        show(report, Console(emoji=False))
