"""Where text goes: results to standard output, progress and errors to standard error."""

import json
import logging
import os
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from typing import Any, TextIO

from rich.console import Console

from enginecast.errors import DefectError, EnginecastError
from enginecast.printable import printable

WIDTH = 120
"""Columns of tables where nobody has a terminal: module paths should not wrap."""


SCHEMA_VERSION = 1
"""Of what `--json` prints: it grows when a name goes or changes its meaning, not when one comes."""
_apart: list[TextIO] = []
_collected: list[list[Mapping[str, Any]]] = []
_quiet = [False]
_command = [""]


@contextmanager
def results_apart() -> Iterator[None]:
    """Standard output gets results alone; what a model's code prints goes to standard error."""
    _apart.append(sys.stdout)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        _apart.pop()


def standard_output() -> TextIO:
    """Where results go."""
    return _apart[-1] if _apart else sys.stdout


def results() -> Console:
    """A console on standard output."""
    return _console(standard_output())


def progress(quiet: bool = False) -> Console:
    """A console on standard error; silent after `be_quiet`."""
    return _console(sys.stderr, quiet or _quiet[-1])


def errors() -> Console:
    """A console on standard error for what must not be missed: errors and warnings."""
    return _console(sys.stderr)


def loading() -> None:
    """Report that torch is being loaded, which takes seconds, before the first line of work."""
    if "torch" not in sys.modules:
        say(progress(), "loading torch")


def remember_command(arguments: Sequence[str]) -> None:
    """Keep the command line, for what says how it was made."""
    _command[:] = [shlex.join(["enginecast", *arguments])]


def command_line() -> str:
    """As it would be typed again."""
    return _command[-1]


def be_quiet(quiet: bool) -> None:
    """Whether commands keep their progress to themselves."""
    _quiet[:] = [quiet]


def say(console: Console, text: str, style: str | None = None) -> None:
    """Print lines as they are, however long: who reads a log wants sentences in one piece."""
    console.print(printable(text), style=style, soft_wrap=True, markup=False, highlight=False)


def show_error(error: EnginecastError) -> None:
    """Print an error, the lines of a package that has a defect, and the way out."""
    console = errors()
    say(console, f"error: {error.message}", "bold red")
    if isinstance(error, DefectError) and error.trace:
        say(console, error.trace.rstrip())
    if error.hint:
        say(console, error.hint)


def _console(file: TextIO, quiet: bool = False) -> Console:
    # Without markup: "[batch, 3]" is a shape and no style.
    console = Console(file=file, quiet=quiet, markup=False, highlight=False, emoji=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = WIDTH
    return console


def show_log(verbose: int) -> None:
    """Send the log to standard error: what is done (1), or everything (2 and more)."""
    if verbose:
        level = logging.DEBUG if verbose > 1 else logging.INFO
        logging.basicConfig(stream=sys.stderr, level=level, format="%(name)s: %(message)s")


@contextmanager
def collecting_json() -> Iterator[list[Mapping[str, Any]]]:
    """What `print_json` gets in the block goes into a list, and not to standard output."""
    _collected.append([])
    try:
        yield _collected[-1]
    finally:
        _collected.pop()


def error_content(error: EnginecastError) -> dict[str, Any]:
    """An error for `print_json`."""
    # Of the tree at the top of errors.py, which is what a script can know.
    bases = (base for base in type(error).__mro__ if base.__module__ == DefectError.__module__)
    kind = next(bases).__name__
    return {"error": kind, "message": error.message, "hint": error.hint, **error.details}


def print_json(content: Mapping[str, Any]) -> None:
    """One JSON object on stdout; a manifest in it keeps the version of its own schema."""
    versioned = {"schema_version": SCHEMA_VERSION, **content}
    if _collected:
        _collected[-1].append(versioned)
        return
    print(json.dumps(versioned, indent=1, sort_keys=True), file=standard_output())
