"""`opt --watch`: the passes again whenever one of their files changes.

The model is captured once.
"""

import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from rich.console import Console

from enginecast.cli.opt_page import run_with_texts, show
from enginecast.cli.terminal.output import say, show_error, standard_output
from enginecast.compiler.prepare.program import Prepared
from enginecast.compiler.prepare.reference import reference_of
from enginecast.compiler.request import computed_dtype
from enginecast.compiler.steps import Steps
from enginecast.errors import EnginecastError
from enginecast.passes.registry import build
from enginecast.plugins import OURS, forget, own_files
from enginecast.verification.reference import Reference

POLL = 0.2
"""Seconds between two looks at the files."""


def watch_passes(
    prepared: Prepared, specs: tuple[str, str], steps: Steps, console: Console
) -> None:
    """Run the passes of two specs now and after each change of their files, until Ctrl-C.

    Args:
        specs: the pipeline and the lowering.
    """
    references: dict[str, Reference] = {}
    modules = {type(pass_).__module__ for spec in specs for pass_ in build(spec)}
    own = {module for module in modules if module.partition(".")[0] == OURS}
    if own != modules:  # who has a package of their own changes that, and not ours
        modules -= own
    files = {file for module in modules for file in own_files(module)}
    rounds = 0

    def run() -> Iterable[Path]:
        nonlocal rounds, files
        if rounds:
            say(console, f"--- round {rounds + 1}")
            for module in modules:
                forget(module)
        rounds += 1
        try:
            passes, lowering = map(build, specs)
            dtype = computed_dtype(passes)
            if dtype not in references:
                references[dtype] = reference_of(prepared, dtype)
            done, texts = run_with_texts(prepared, passes, lowering, steps, references[dtype])
            show(done, texts.diffs, None)
            standard_output().flush()
            for check in done.checks:
                if check.failure:
                    say(console, f"error: {check.failure}", "bold red")
        except EnginecastError as error:
            show_error(error)
        files |= {file for module in modules for file in own_files(module)}
        say(console, f"watching {', '.join(sorted(file.name for file in files))}; Ctrl-C ends")
        return files

    writes, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:  # bytecode is known by whole seconds and sizes: two quick edits look alike
        watch(run, files)
    finally:
        sys.dont_write_bytecode = writes
    say(console, "no longer watching")


def watch(
    run: Callable[[], Iterable[Path]], known: Iterable[Path] = (), poll: float = POLL
) -> None:
    """Call `run` now, and again after each change of a file that it returns; Ctrl-C ends it.

    A file that is gone for a moment, as while an editor saves it, is waited for.

    Args:
        known: files whose changes during the first call count, too.
    """
    try:
        files = set(known)
        while True:
            before = _stamps(files)
            files |= set(run())
            before = {**_stamps(files), **before}  # an edit during the run counts
            while _stamps(files) == before:
                time.sleep(poll)
            settled: dict[Path, tuple[int, int] | None] = {}
            while (now := _stamps(files)) != settled or None in now.values():
                settled = now
                time.sleep(poll / 2)
    except KeyboardInterrupt:
        return


def _stamps(files: Iterable[Path]) -> dict[Path, tuple[int, int] | None]:
    """When each file was changed, and its size; None where it is not there."""
    found: dict[Path, tuple[int, int] | None] = {}
    for file in files:
        try:
            stat = file.stat()
            found[file] = stat.st_mtime_ns, stat.st_size
        except OSError:
            found[file] = None
    return found
