"""Passes run alone: their texts, and the tables of what each did."""

from collections.abc import Sequence
from typing import Any

from enginecast.cli.terminal.output import progress, results, say, standard_output
from enginecast.compiler.engines.rewrite import Rewritten, run_passes
from enginecast.compiler.prepare.program import Prepared
from enginecast.compiler.steps import Steps
from enginecast.passes.ir.base import Pass
from enginecast.passes.ir.text import print_ir
from enginecast.verification.metrics import times
from enginecast.verification.reference import Reference
from enginecast.verification.report.layout import print_table


def run_with_texts(
    prepared: Prepared,
    passes: Sequence[Pass],
    lowering: Sequence[Pass],
    steps: Steps,
    reference: Reference | None = None,
) -> tuple[Rewritten, list[str]]:
    """Run passes; also the program in words, before the first and after each."""
    texts = [print_ir(prepared.captured.program)]

    def keep(_pass: Any, program: Any, _run: Any) -> None:
        texts.append(print_ir(program))

    return run_passes(prepared, passes, steps, lowering, [keep], reference), texts


def show(done: Rewritten, diffs: Sequence[str] | None, ir: str | None) -> None:
    """Print tables; where progress goes if texts go to standard output, to be piped on."""
    console = results() if diffs is None and ir is None else progress()
    rows = []
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
    for run, diff in zip(done.runs, diffs or (), strict=False):
        print(f"# {run.pass_.name}\n{diff}", end="", file=standard_output())
    print(ir or "", end="", file=standard_output())
