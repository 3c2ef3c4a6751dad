"""How the command line tells of errors and warnings: on standard error, and as JSON if asked."""

import json
import sys
import traceback
from typing import Any

import typer

from enginecast import errors
from enginecast.errors import EnginecastError, UsageError
from enginecast.terminal import progress, say

BadCommandLine: type[Exception] = typer.BadParameter.__mro__[2]
"""ClickException: newer versions of typer carry their own copy of click's."""

CRASHED = 70
"""EX_SOFTWARE of sysexits.h.  Python's own 1 would read as a verdict."""


def fail(error: EnginecastError, *, as_json: bool) -> int:
    """Print an error; return its exit code."""
    console = progress()
    say(console, f"error: {error.message}", "bold red")
    if error.hint:
        say(console, error.hint)
    if as_json:
        # Of the tree at the top of errors.py, which is what a script can know.
        bases = (base for base in type(error).__mro__ if base.__module__ == errors.__name__)
        kind = next(bases).__name__
        told = {"error": kind, "message": error.message, "hint": error.hint, **error.details}
        print(json.dumps(told, indent=1))
    return error.exit_code


def crash() -> int:
    """Print the traceback of an unexpected exception; return the exit code for one."""
    traceback.print_exc()
    print("this is a defect of enginecast; please report it with the lines above", file=sys.stderr)
    return CRASHED


def usage_error(error: Exception) -> UsageError:
    """An error of the command line's parser as one of ours."""
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "enginecast"
    message: str = error.format_message()  # type: ignore[attr-defined]
    return UsageError(message, hint=f"`{command} --help` lists what it takes.")


def show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    """Stands in for `warnings.showwarning`: the message alone, without a line of our source."""
    print(f"warning: {message}", file=sys.stderr)
