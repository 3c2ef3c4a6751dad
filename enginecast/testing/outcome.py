"""Run passes on a copy of a program, and look at what they did."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from torch.export import ExportedProgram

from enginecast.passes.ir.base import Pass, PassContext, Site
from enginecast.passes.ir.edit import structural_copy
from enginecast.passes.ir.pipeline import PassRun, run_pipeline
from enginecast.passes.ir.text import diff_ir, print_ir
from enginecast.passes.registry import build
from enginecast.public import some
from enginecast.testing.captured import Captured

Passes = str | Pass | Sequence[Pass]
"""A spec such as "canonicalize,fuse-silu", or instances."""


@dataclass(frozen=True, eq=False)
class Outcome:
    """A program after passes."""

    captured: Captured
    program: ExportedProgram
    runs: tuple[PassRun, ...]
    """What each pass did, in order."""

    def __repr__(self) -> str:
        """The passes, and how many places each rewrote."""
        ran = some(f"{run.pass_.name} rewrote {run.rewritten}" for run in self.runs)
        return f"Outcome({type(self.captured.module).__name__}: {ran})"

    @property
    def sites(self) -> list[Site]:
        """Every place that the last pass looked at."""
        return list(self.runs[-1].sites)

    @property
    def rewritten(self) -> list[Site]:
        """Those that the last pass rewrote."""
        return [site for site in self.sites if site.rewritten]

    @property
    def reasons(self) -> list[str]:
        """Why the last pass left the others alone, in order."""
        return reasons(self.sites)

    @property
    def notes(self) -> list[str]:
        """The notes of the rewritten sites, in order."""
        return notes(self.sites)

    @cached_property
    def diff(self) -> str:
        """What all passes changed, as a diff of the IR."""
        return diff(self.captured.program, self.program)


def run_passes(captured: Captured, passes: Passes, context: PassContext | None = None) -> Outcome:
    """Run passes on a copy of a captured program, with the checks that every export makes.

    Args:
        captured: of `capture`; it stays as it is.
        passes: a spec, a pass, or several.
        context: what they may know besides; None: the inputs of the capture, for calibration.

    Raises:
        PassDefectError: a pass raised, or left a program that is not valid.

    Examples:
        >>> import torch
        >>> from enginecast.testing import capture, run_passes
        >>> captured = capture(lambda x: x.reshape(3, 8) * 2, torch.randn(3, 8))
        >>> run_passes(captured, "canonicalize")
        Outcome(Function: canonicalize rewrote 1)
    """
    if context is None:
        context = PassContext(calibration=(captured.named(captured.inputs),))
    program, runs = run_on(captured.program, passes, context)
    return Outcome(captured, program, tuple(runs))


def run_on(
    program: ExportedProgram, passes: Passes, context: PassContext
) -> tuple[ExportedProgram, list[PassRun]]:
    """A copy of a program after passes, and what each did; see `run_passes`.

    Args:
        program: it stays as it is.
        passes: a spec, a pass, or several.
        context: what they may know besides.
    """
    if isinstance(passes, str):
        chosen: Sequence[Pass] = build(passes)
    else:
        chosen = (passes,) if isinstance(passes, Pass) else passes
    copy = structural_copy(program)
    return copy, run_pipeline(chosen, copy, context)


def targets(program: ExportedProgram) -> list[str]:
    """The ops of a program in order: `add.Tensor`.

    Args:
        program: to look at.
    """
    return [
        str(node.target).removeprefix("aten.")
        for node in program.graph.nodes
        if node.op == "call_function"
    ]


def count(program: ExportedProgram, *names: str) -> int:
    """How many nodes call one of some ops.

    Args:
        program: to look at.
        names: such as "add.Tensor"; "add" means all overloads.
    """
    return sum(t in names or t.partition(".")[0] in names for t in targets(program))


def reasons(sites: Sequence[Site]) -> list[str]:
    """Why sites were left alone.

    Args:
        sites: of a pass.
    """
    return [site.reason for site in sites if not site.rewritten]


def notes(sites: Sequence[Site]) -> list[str]:
    """The notes of the rewritten sites.

    Args:
        sites: of a pass.
    """
    return [site.note for site in sites if site.rewritten]


def diff(before: ExportedProgram, after: ExportedProgram) -> str:
    """What differs between two programs, as a diff of the IR.

    Args:
        before: one program.
        after: the other one.
    """
    return diff_ir(print_ir(before), print_ir(after))
