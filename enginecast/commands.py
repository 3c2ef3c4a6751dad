"""What the commands that need torch do: export, inspect, opt, passes."""

import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import msgspec
import torch
from rich.console import Console
from rich.table import Table

from enginecast.commands_engine import print_json
from enginecast.driver import export
from enginecast.errors import UsageError
from enginecast.inspection import inspect_model, print_inspection
from enginecast.job import Export
from enginecast.passes.base import PassContext
from enginecast.passes.graph_edit import structural_copy
from enginecast.passes.ir_text import diff_ir
from enginecast.passes.ir_text import print_ir as print_ir_of
from enginecast.passes.options import describe, option_fields
from enginecast.passes.pipeline import Observer as PassObserver
from enginecast.passes.pipeline import PassRun, build, run_pipeline
from enginecast.passes.registry import known_passes, pass_class
from enginecast.plan import FALLBACKS, make_plan
from enginecast.prepare import ModelOptions, open_model, prepare
from enginecast.rewrite import OBSERVED
from enginecast.steps import Steps
from enginecast.verify.program import Observer
from enginecast.verify.report import print_report

_ARCH = re.compile(r"sm\d{2,3}a?")


def run_export(
    model: str,
    output: Path,
    *,
    target: str,
    precision: str | None,
    pipeline: str | None,
    skip_patterns: tuple[str, ...],
    skip_classes: tuple[str, ...],
    inputs: Path | None,
    prompts: Path | None,
    dynamic: tuple[str, ...],
    random_weights: int | None,
    device: str | None,
    arch: str | None,
    fallback: str,
    threads: int | None,
    overwrite: bool,
    allow_code: bool,
    as_json: bool,
    console: Console,
) -> int:
    """Export; return the exit code: 1 when the result does not agree with eager."""
    if fallback not in FALLBACKS:
        raise UsageError(f"--fallback {fallback}: expected one of {', '.join(FALLBACKS)}")
    if arch is not None and not _ARCH.fullmatch(arch):
        raise UsageError(f"--arch {arch}: expected a GPU architecture such as sm90")
    plan = make_plan(target, precision, pipeline, device, skip_patterns, skip_classes)
    options = ModelOptions(random_weights, allow_code, inputs, prompts, dynamic)
    steps = Steps(console)
    done = export(model, output, replace(plan, arch=arch), options, None, threads, overwrite, steps)
    if as_json:
        print_json(_export_json(done))
    else:
        print_report(done.report, console)
        _print_where(done, console)
    return 0 if done.bundle is not None else 1


def _print_where(done: Export, console: Console) -> None:
    if done.bundle is None:
        line = f"nothing was published; the report is in {done.folder}"
    else:
        line = f"{done.folder}: {done.nodes} nodes, {done.size / 2**20:.1f} MiB"
    console.print(line, markup=False, highlight=False)


def _export_json(done: Export) -> dict[str, Any]:
    verdict = done.report.verdict
    return {
        "outcome": verdict.outcome,
        "engine": verdict.engine,
        "bundle": str(done.folder) if done.bundle is not None else None,
        "rejected": str(done.folder) if done.bundle is None else None,
        "verdict": msgspec.to_builtins(verdict),
        "precision": done.report.precision,
        "pipeline": done.report.pipeline,
        "fusions": msgspec.to_builtins(done.report.fusions),
        "nodes": done.nodes,
        "ops": dict(done.ops),
        "size": done.size,
        "seconds": dict(done.report.seconds),
        "notes": list(done.report.notes),
    }


def run_inspect(
    model: str,
    *,
    precision: str | None,
    pipeline: str | None,
    inputs: Path | None,
    dynamic: tuple[str, ...],
    random_weights: int | None,
    device: str | None,
    allow_code: bool,
    as_json: bool,
    console: Console,
) -> None:
    """Capture and plan; print."""
    plan = make_plan("onnxruntime", precision, pipeline, device)
    options = ModelOptions(random_weights, allow_code, inputs, None, dynamic)
    prepared = prepare(open_model(model, options), options, Steps(console))
    found = inspect_model(prepared, plan)
    if as_json:
        print_json(found.to_json())
    else:
        print_inspection(found, Console())


def run_opt(
    model: str,
    pipeline: str,
    *,
    print_ir: bool,
    print_diff: bool,
    output: Path | None,
    inputs: Path | None,
    dynamic: tuple[str, ...],
    random_weights: int | None,
    allow_code: bool,
    as_json: bool,
    console: Console,
) -> int:
    """Run passes on a captured program; return 1 when one broke its promise."""
    passes = build(pipeline)
    if output is not None and output.suffix != ".pt2":
        raise UsageError(f"-o {output}: expected a name that ends in .pt2")
    options = ModelOptions(random_weights, allow_code, inputs, None, dynamic)
    prepared = prepare(open_model(model, options), options, Steps(console))
    program = structural_copy(prepared.captured.program)
    observer = Observer(
        prepared.captured.program,
        prepared.cases[:OBSERVED],
        names=prepared.output_names,
        mask_input=prepared.mask_input,
        strict=False,
    )
    texts = [print_ir_of(program)]
    observers: list[PassObserver] = [observer]
    if print_diff:
        observers.append(lambda _pass, changed, _run: texts.append(print_ir_of(changed)))
    runs = run_pipeline(passes, program, PassContext(), tuple(observers))
    failures = [check.failure for check in observer.checks if check.failure]
    if as_json:
        print_json(_opt_json(runs, observer))
    else:
        _print_runs(runs, observer, console)
    for before, after, run in zip(texts, texts[1:], runs, strict=False):
        print(f"# {run.pass_.name}\n{diff_ir(before, after)}", end="")
    if print_ir:
        print(print_ir_of(program))
    for failure in failures:
        console.print(f"error: {failure}", style="bold red", markup=False, highlight=False)
    if output is not None and not failures:
        torch.export.save(program, output)
    return 1 if failures else 0


def _print_runs(runs: list[PassRun], observer: Observer, console: Console) -> None:
    table = Table("pass", "rewritten", "left alone", "ms", "worst place", "error / floor")
    for run, check in zip(runs, observer.checks, strict=True):
        left = str(len(run.sites) - run.rewritten)
        worst = f"{check.worst_ratio:.2g}"
        name = run.pass_.name
        table.add_row(
            name, str(run.rewritten), left, f"{run.seconds * 1e3:.0f}", check.worst_place, worst
        )
    console.print(table)
    for run in runs:
        for site in run.sites:
            if site.reason:
                console.print(
                    f"  {run.pass_.name}: {site.module} {site.source}: {site.reason}",
                    markup=False,
                    highlight=False,
                )


def _opt_json(runs: list[PassRun], observer: Observer) -> dict[str, Any]:
    return {
        "passes": [
            {
                "name": run.pass_.name,
                "rewritten": run.rewritten,
                "seconds": run.seconds,
                "failure": check.failure,
                "worst_place": check.worst_place,
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
            for run, check in zip(runs, observer.checks, strict=True)
        ]
    }


def list_passes(*, as_json: bool) -> None:
    """Every pass with its options, order and promise."""
    rows = []
    for name in sorted(known_passes()):
        found = pass_class(name)
        defaults = {f.name: f.default for f in fields(found)}
        rows.append(
            {
                "name": name,
                "summary": (found.__doc__ or "").strip().splitlines()[0],
                "promise": found.promise,
                "after": sorted(found.after),
                "options": {
                    option: f"{describe(annotation)} = {defaults[option]!r}"
                    for option, (annotation, _) in option_fields(found).items()
                },
            }
        )
    if as_json:
        print_json(rows)
        return
    table = Table("pass", "what it does", "promise", "after", "options")
    for row in rows:
        options = "\n".join(f"{k}: {v}" for k, v in row["options"].items())  # type: ignore[attr-defined]
        cells = (row["name"], row["summary"], row["promise"], "\n".join(row["after"]), options)
        table.add_row(*map(str, cells))
    Console().print(table)
