"""The command line: a thin skin over the Python API.  Results go to stdout, progress to stderr."""

import os
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, NoReturn

import typer

from enginecast.cli.bench import bench
from enginecast.cli.bisect import bisect
from enginecast.cli.cache.app import app as cache_app
from enginecast.cli.diffusers import app as diffusers_app
from enginecast.cli.doctor import doctor
from enginecast.cli.export import export
from enginecast.cli.generate import generate
from enginecast.cli.inspect.command import inspect
from enginecast.cli.opt import opt
from enginecast.cli.options.every_command import common
from enginecast.cli.passes.app import app as passes_app
from enginecast.cli.report import report
from enginecast.cli.run import run
from enginecast.cli.sign import sign, trust
from enginecast.cli.terminal import output
from enginecast.cli.terminal.help import HelpCommand, WorkOrder
from enginecast.cli.tune import tune
from enginecast.cli.verify import verify
from enginecast.doctor.checks import outdated
from enginecast.errors import DefectError, EnginecastError, SourceError, UsageError
from enginecast.installation import missing, unimportable
from enginecast.library_names import untested
from enginecast.plugins import plugin_defect
from enginecast.version import __version__

app = typer.Typer(
    name="enginecast",
    help="Turn PyTorch models into engines checked against eager PyTorch.",
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # its tables cut the names of options
    context_settings={"help_option_names": ["-h", "--help"]},
)

BadCommandLine: type[Exception] = typer.BadParameter.__mro__[2]
"""ClickException: newer versions of typer carry their own copy of click's."""

CRASHED = DefectError.exit_code
"""Python's own 1 would read as a verdict."""

COMPLETE = "_ENGINECAST_COMPLETE"
"""The variable by which a shell asks for completions."""
INTERRUPTED = 130
CLOSED = 141
"""A shell's word for SIGPIPE: who read the output has gone, as `head` does."""
ENDING = (signal.SIGTERM, signal.SIGHUP)


class Received:
    """The signal that asked the process to end, if one did."""

    signal: int = signal.SIGINT


@contextmanager
def ends_as_interrupted() -> Iterator[Received]:
    """Have SIGTERM and SIGHUP clean up as Ctrl-C does, where nobody handles or ignores them.

    Afterwards they do what they did before, even if one came: a caller of `main` may live on or
    fork processes, which must end when they are asked to.
    """
    received = Received()
    handled = []

    def end(number: int, _: object) -> None:
        if received.signal == signal.SIGINT:  # a second one must not cut the clean-up short
            received.signal = number
            raise KeyboardInterrupt

    if threading.current_thread() is threading.main_thread():
        for number in ENDING:
            if signal.getsignal(number) == signal.SIG_DFL:
                signal.signal(number, end)
                handled.append(number)
    try:
        yield received
    finally:
        for number in handled:
            signal.signal(number, signal.SIG_DFL)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run a command and leave with its exit code; every error becomes one message."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    output.be_quiet(False)
    output.remember_command(arguments)
    as_json = "--json" in arguments
    with ends_as_interrupted() as received, shown_as_messages():
        code = _exit_code(arguments, as_json=as_json)
        if code == INTERRUPTED:  # raised above, or typer's word for it
            code = 128 + received.signal
            print("interrupted", file=sys.stderr)
    sys.exit(code or 0)


def _exit_code(arguments: Sequence[str], *, as_json: bool) -> int | None:
    """Run a command, and report what went wrong as one message."""
    try:
        code: int | None = app(args=arguments, prog_name="enginecast", standalone_mode=False)
        return code
    except EnginecastError as error:
        return fail(error, as_json=as_json)
    except BadCommandLine as error:
        return fail(usage_error(error), as_json=as_json)
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except Exception as error:  # a library, a plugin, or else a defect of ours
        known = typer.main.get_group(app).commands
        called = " ".join(["enginecast", *[word for word in arguments if word in known][:1]])
        cause = missing(error, called) or plugin_defect(error) or unimportable(error) or outdated()
        return crash() if cause is None else fail(cause, as_json=as_json)
    except SystemExit as error:  # nothing was done, whatever code it names
        if COMPLETE in os.environ:  # that was the shell's question
            raise
        if isinstance(error.__context__, BrokenPipeError):  # rich's word for a reader that is gone
            return CLOSED
        return fail(plugin_defect(error) or left(error), as_json=as_json)
    except BaseException as error:  # such as asyncio.CancelledError
        defect = plugin_defect(error)
        return crash() if defect is None else fail(defect, as_json=as_json)


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", "-V", help="Print the version.")] = False,
) -> None:
    if version:
        print(f"enginecast {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help(), file=sys.stderr)
        raise typer.Exit(UsageError.exit_code)


for command in (
    inspect,
    export,
    verify,
    report,
    run,
    generate,
    bench,
    tune,
    opt,
    bisect,
    sign,
    trust,
    doctor,
):
    app.command()(command)
app.add_typer(diffusers_app, name="diffusers")
app.add_typer(cache_app, name="cache")
app.add_typer(passes_app, name="passes")
assert passes_app.registered_callback is not None
listing = passes_app.registered_callback
assert listing.callback is not None
listing.callback = common(listing.callback)
for group in (app, diffusers_app, cache_app, passes_app):
    group.info.cls = WorkOrder
    for one in group.registered_commands:
        assert one.callback is not None
        one.callback, one.cls = common(one.callback), HelpCommand


def fail(error: EnginecastError, *, as_json: bool) -> int:
    """Print an error; return its exit code."""
    output.show_error(error)
    if as_json:
        output.print_json(output.error_content(error))
    return error.exit_code


def left(error: SystemExit) -> SourceError:
    """A model's code that ends Python."""
    *_, last = traceback.extract_tb(error.__traceback__)
    return SourceError(
        f"{last.filename}:{last.lineno}: the model's code exited Python: SystemExit: {error}",
        hint="It must not call sys.exit.",
    )


def crash() -> int:
    """Print the traceback of an unexpected exception; return the exit code for one."""
    traceback.print_exc()
    for sentence in untested():
        print(sentence, file=sys.stderr)
    print("this is a defect of enginecast; please report it with the lines above", file=sys.stderr)
    return CRASHED


def usage_error(error: Exception) -> UsageError:
    """An error of the command line's parser as one of ours."""
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "enginecast"
    message: str = error.format_message()  # type: ignore[attr-defined]
    return UsageError(message, hint=f"`{command} --help` lists what it takes.")


@contextmanager
def shown_as_messages() -> Iterator[None]:
    """Show warnings as messages until a command ends: those of its caller are shown as before."""
    before = warnings.showwarning
    warnings.showwarning = show_warning
    try:
        yield
    finally:
        warnings.showwarning = before


def show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    """Stands in for `warnings.showwarning`: the message alone, without a line of our source."""
    print(f"warning: {message}", file=sys.stderr)
