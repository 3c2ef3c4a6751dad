"""`enginecast opt`: passes alone, with what each changed and what the comparison after it found."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch.export import ExportedProgram

from enginecast.commands_engine import print_json
from enginecast.passes.base import Pass
from enginecast.passes.graph_edit import structural_copy
from enginecast.passes.ir_text import diff_ir
from enginecast.passes.ir_text import print_ir as text_of
from enginecast.passes.pipeline import PassRun, build, run_pipeline
from enginecast.plan import computed_dtype
from enginecast.prepare import ModelOptions, Prepared, open_model, prepare, reference_of
from enginecast.rewrite import observe
from enginecast.steps import Steps
from enginecast.terminal import results_apart, say, standard_output, table
from enginecast.verify.report_data import PassCheck
from enginecast.verify.verdict import times


@dataclass(frozen=True)
class Rewrite:
    """A program after passes, and how it came to be."""

    program: ExportedProgram
    runs: tuple[PassRun, ...]
    checks: tuple[PassCheck, ...]
    diffs: tuple[str, ...]
    """What each pass changed in the program's text."""

    @property
    def failures(self) -> tuple[str, ...]:
        """Broken promises."""
        return tuple(check.failure for check in self.checks if check.failure)


@results_apart()
def run_opt(
    model: str,
    pipeline: str,
    options: ModelOptions,
    *,
    print_ir: bool,
    print_diff: bool,
    output: Path | None,
    as_json: bool,
    console: Console,
) -> int:
    """Run passes on a captured program; return 1 when one broke its promise."""
    passes = build(pipeline)
    steps = Steps(console)
    done = run_passes(prepare(open_model(model, options), options, steps), passes, steps)
    saved = output is not None and not done.failures
    if output is not None and saved:
        save(done.program, output)
    if as_json:
        print_json(_as_json(done, print_ir, print_diff, output if saved else None))
    else:
        _show(done, print_ir, print_diff, console)
    for failure in done.failures:
        say(console, f"error: {failure}", "bold red")
    if done.failures:
        say(console, "`enginecast bisect` with this pipeline names the sites that do harm.")
    if output is not None:
        say(console, f"{output}: saved" if saved else f"{output}: not written")
    return 1 if done.failures else 0


def run_passes(prepared: Prepared, passes: Sequence[Pass], steps: Steps) -> Rewrite:
    """Run passes on a copy of the captured program and compare after each."""
    with steps("reference"):
        reference = reference_of(prepared, computed_dtype(passes))
    program = structural_copy(prepared.captured.program)
    planned, observer = observe(prepared, passes, reference)
    texts = [text_of(program)]

    def keep_text(_pass: Pass, changed: ExportedProgram, _run: PassRun) -> None:
        texts.append(text_of(changed))

    with steps("passes"):
        runs = run_pipeline(passes, program, prepared.context, (planned, observer, keep_text))
    diffs = tuple(map(diff_ir, texts, texts[1:]))
    return Rewrite(program, tuple(runs), tuple(observer.checks), diffs)


def save(program: ExportedProgram, path: Path) -> None:
    """Write a `.pt2` file, whole or not at all."""
    # torch wants the ending, and a folder can hold an unfinished file of another process.
    unfinished = path.with_name(f".{path.stem}.tmp-{os.getpid()}.pt2")
    try:
        torch.export.save(program, unfinished)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def _show(done: Rewrite, print_ir: bool, print_diff: bool, console: Console) -> None:
    """Tables where progress goes; texts, which may be piped on, on standard output."""
    shown = table("pass", "rewritten", "left alone", "ms", "worst place", "error / floor")
    for run, check in zip(done.runs, done.checks, strict=True):
        ratio = "equal" if check.worst_error == 0 else times(check.worst_ratio)
        left, spent = len(run.sites) - run.rewritten, f"{run.seconds * 1e3:.0f}"
        name, place = run.pass_.name, f"{check.worst_place} {check.worst_source}".strip()
        shown.add_row(name, str(run.rewritten), str(left), spent, place, ratio)
    console.print(shown)
    for run in done.runs:
        for site in run.sites:
            if site.reason:
                place = f"{site.module} {site.source}".strip()
                say(console, f"{run.pass_.name} left {place} alone: {site.reason}")
    texts = [f"# {run.pass_.name}\n{diff}" for run, diff in zip(done.runs, done.diffs, strict=True)]
    for text in (*(texts if print_diff else ()), *([text_of(done.program)] if print_ir else ())):
        print(text, end="", file=standard_output())


def _as_json(
    done: Rewrite, print_ir: bool, print_diff: bool, output: Path | None
) -> dict[str, Any]:
    content: dict[str, Any] = {
        "output": None if output is None else str(output),
        "passes": [
            {
                "name": run.pass_.name,
                "rewritten": run.rewritten,
                "seconds": run.seconds,
                "failure": check.failure,
                "worst_place": check.worst_place,
                "worst_error": check.worst_error,
                "worst_ratio": check.worst_ratio,
                "sites": [
                    {
                        "node": site.node,
                        "module": site.module,
                        "source": site.source,
                        "reason": site.reason,
                        "note": site.note,
                    }
                    for site in run.sites
                ],
            }
            | ({"diff": diff} if print_diff else {})
            for run, check, diff in zip(done.runs, done.checks, done.diffs, strict=True)
        ],
    }
    return content | ({"ir": text_of(done.program)} if print_ir else {})
