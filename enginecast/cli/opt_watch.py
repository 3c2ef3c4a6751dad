"""`opt --watch`: the passes again whenever one of their files changes.

The model is captured once.
"""

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from enginecast.cli.terminal.output import say, show_error, standard_output
from enginecast.cli.terminal.watch import watch
from enginecast.compiler.prepare import Prepared
from enginecast.compiler.reference import reference_of
from enginecast.compiler.request import computed_dtype
from enginecast.compiler.rewrite import run_passes
from enginecast.compiler.steps import Steps
from enginecast.errors import EnginecastError
from enginecast.passes.ir.text import diff_ir, print_ir
from enginecast.passes.registry import build
from enginecast.plugins import OURS, forget, own_files
from enginecast.verification.reference import Reference

if TYPE_CHECKING:
    from torch.export import ExportedProgram

    from enginecast.passes.ir.base import Pass
    from enginecast.passes.ir.pipeline import PassRun


class Watched:
    """The passes of two specs, as their files are now.

    Args:
        specs: the pipeline and the lowering.
    """

    def __init__(
        self, prepared: Prepared, specs: tuple[str, str], steps: Steps, console: Console
    ) -> None:
        self._prepared, self._specs = prepared, specs
        self._steps, self._console = steps, console
        self._references: dict[str, Reference] = {}
        self._modules = {type(pass_).__module__ for spec in specs for pass_ in build(spec)}
        own = {module for module in self._modules if module.partition(".")[0] == OURS}
        if own != self._modules:  # who has a package of their own changes that, and not ours
            self._modules -= own
        self.files = {file for module in self._modules for file in own_files(module)}
        self._rounds = 0

    def run(self) -> Iterable[Path]:
        """Run the passes, print what they changed, and return the files to watch."""
        if self._rounds:
            say(self._console, f"--- round {self._rounds + 1}")
            for module in self._modules:
                forget(module)
        self._rounds += 1
        try:
            self._round()
        except EnginecastError as error:
            show_error(error)
        self.files |= {file for module in self._modules for file in own_files(module)}
        names = ", ".join(sorted(file.name for file in self.files))
        say(self._console, f"watching {names}; Ctrl-C ends")
        return self.files

    def _round(self) -> None:
        from enginecast.cli.opt import show

        passes, lowering = map(build, self._specs)
        dtype = computed_dtype(passes)
        if dtype not in self._references:
            self._references[dtype] = reference_of(self._prepared, dtype)
        texts = [print_ir(self._prepared.captured.program)]

        def keep_text(_pass: "Pass", program: "ExportedProgram", _run: "PassRun") -> None:
            texts.append(print_ir(program))

        done = run_passes(
            self._prepared,
            passes,
            self._steps,
            lowering,
            [keep_text],
            self._references[dtype],
        )
        show(done, list(map(diff_ir, texts, texts[1:])), None)
        standard_output().flush()
        for check in done.checks:
            if check.failure:
                say(self._console, f"error: {check.failure}", "bold red")


def watch_passes(
    prepared: Prepared, specs: tuple[str, str], steps: Steps, console: Console
) -> None:
    """Run the passes of two specs now and after each change of their files, until Ctrl-C."""
    watched = Watched(prepared, specs, steps, console)
    writes, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:  # bytecode is known by whole seconds and sizes: two quick edits look alike
        watch(watched.run, watched.files)
    finally:
        sys.dont_write_bytecode = writes
    say(console, "no longer watching")
