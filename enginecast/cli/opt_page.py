"""Passes run alone: their texts, and the tables of what each did."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch.export import ExportedProgram

from enginecast.cli.terminal.output import progress, results, say, standard_output
from enginecast.compiler.engines.rewrite import Rewritten, run_passes
from enginecast.compiler.prepare.program import Prepared
from enginecast.compiler.steps import Steps
from enginecast.passes.ir.base import Pass
from enginecast.passes.ir.pipeline import Observer, PassRun
from enginecast.passes.ir.text import diff_ir, print_ir
from enginecast.verification.metrics import times
from enginecast.verification.reference import Reference
from enginecast.verification.report.layout import print_table


@dataclass
class Texts:
    """A program in words, and what each pass changes in it; called with the program before them."""

    ir: str = ""
    diffs: list[tuple[str, str]] = field(default_factory=list)
    """The name of each pass, and the diff."""

    def __call__(self, program: ExportedProgram) -> Observer:
        self.ir = print_ir(program)
        return self._after

    def _after(self, pass_: Pass, program: ExportedProgram, _: PassRun) -> None:
        before, self.ir = self.ir, print_ir(program)
        self.diffs.append((pass_.name, diff_ir(before, self.ir)))


def run_with_texts(
    prepared: Prepared,
    passes: Sequence[Pass],
    lowering: Sequence[Pass],
    steps: Steps,
    reference: Reference | None = None,
) -> tuple[Rewritten, Texts]:
    """Run passes; also the program in words."""
    texts = Texts()
    watch = [texts(prepared.captured.program)]
    return run_passes(prepared, passes, steps, lowering, watch, reference), texts


def show(
    done: Rewritten,
    diffs: Sequence[tuple[str, str]] | None,
    ir: str | None,
    captured: Sequence[PassRun] = (),
) -> None:
    """Print tables; where progress goes if texts go to standard output, to be piped on.

    Args:
        diffs: names of passes, and what they changed.
        captured: the passes of the capture, which are not compared.
    """
    console = results() if diffs is None and ir is None else progress()
    rows = [
        (run.pass_.name, str(run.rewritten), "", f"{run.seconds * 1e3:.0f}", "", "")
        for run in captured
        if run.rewritten
    ]
    for run, check in zip(done.runs, done.checks, strict=True):
        found = "not finite" if check.worst_ratio is None else times(check.worst_ratio)
        ratio = "equal" if check.worst_error == 0 else found
        left, spent = len(run.sites) - run.rewritten, f"{run.seconds * 1e3:.0f}"
        name, place = run.pass_.name, f"{check.worst_place} {check.worst_source}".strip()
        rows.append((name, str(run.rewritten), str(left), spent, place, ratio))
    columns = ("pass", "rewritten", "left alone", "ms", "worst place", "error / floor")
    print_table(console, columns, rows)
    for run in done.runs:
        for site in run.sites:
            if site.reason:
                place = f"{site.module} {site.source}".strip()
                say(console, f"{run.pass_.name} left {place} alone: {site.reason}")
    for name, diff in diffs or ():
        print(f"# {name}\n{diff}", end="", file=standard_output())
    print(ir or "", end="", file=standard_output())
