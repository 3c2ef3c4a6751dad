"""Passes alone, for pass development: what each changed, and what the comparison after it found."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.export import ExportedProgram

from enginecast.compiler.prepare import Prepared, reference_of
from enginecast.compiler.request import computed_dtype
from enginecast.compiler.rewrite import observe
from enginecast.compiler.steps import Steps
from enginecast.passes.ir.base import Pass
from enginecast.passes.ir.edit import structural_copy, with_weights
from enginecast.passes.ir.pipeline import PassRun, run_pipeline
from enginecast.passes.ir.text import diff_ir, print_ir
from enginecast.verify.report.data import PassCheck


@dataclass(frozen=True)
class Rewrite:
    """A program after passes, and how it came to be."""

    program: ExportedProgram
    runs: tuple[PassRun, ...]
    checks: tuple[PassCheck, ...]
    texts: tuple[str, ...]
    """Of the program as captured, and after each pass."""

    @property
    def diffs(self) -> list[str]:
        """What each pass changed in the program's text."""
        return list(map(diff_ir, self.texts, self.texts[1:]))

    @property
    def failures(self) -> tuple[str, ...]:
        """Broken promises."""
        return tuple(check.failure for check in self.checks if check.failure)


def run_passes(
    prepared: Prepared, passes: Sequence[Pass], steps: Steps, lowering: Sequence[Pass] = ()
) -> Rewrite:
    """Run passes on a copy of the captured program, a lowering last; compare after each."""
    with steps("reference"):
        reference = reference_of(prepared, computed_dtype(passes))
    program = structural_copy(prepared.captured.program)
    planned, observer = observe(prepared, passes, reference)
    texts = [print_ir(program)]

    def keep_text(_pass: Pass, changed: ExportedProgram, _run: PassRun) -> None:
        texts.append(print_ir(changed))

    with steps("passes"):
        runs = run_pipeline(passes, program, prepared.context, (planned, observer, keep_text))
        runs += run_pipeline(lowering, program, prepared.context, (observer, keep_text))
    return Rewrite(program, tuple(runs), tuple(observer.checks), tuple(texts))


def save(program: ExportedProgram, path: Path) -> None:
    """Write a `.pt2` file, whole or not at all."""
    # torch wants the ending, and a folder can hold an unfinished file of another process.
    unfinished = path.with_name(f".{path.stem}.tmp-{os.getpid()}.pt2")
    try:
        torch.export.save(with_weights(program), unfinished)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
