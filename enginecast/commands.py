"""What the commands that need torch do: export, inspect, opt, passes."""

from collections.abc import Collection, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, cast

import msgspec
from rich.console import Console

from enginecast import quantization
from enginecast.capture.way import Fallback
from enginecast.commands_engine import print_json
from enginecast.driver import export, falls_back
from enginecast.errors import CaptureError, EnginecastError, UsageError, VerificationError
from enginecast.flow_page import flow_of, flow_of_refused, print_flow
from enginecast.inspection import inspect_model, print_inspection
from enginecast.job import Export
from enginecast.memory import peak_resident
from enginecast.model_inputs import input_specs
from enginecast.passes.options import describe, option_fields
from enginecast.passes.registry import known_passes, pass_class
from enginecast.plan import FALLBACKS, Plan
from enginecast.prepare import ModelOptions, open_model, prepare
from enginecast.quantization import given_plan
from enginecast.steps import Steps
from enginecast.terminal import results, results_apart, say, table
from enginecast.verify.report import print_report
from enginecast.verify.report_data import Report

UNVERIFIED = "unverified branch"
GIVE_INPUTS = (
    "Give inputs that go the other way (--inputs FILE), or accept it: --allow-unverified-branches."
)


@results_apart()
def run_export(
    model: str,
    output: Path,
    plan: Plan,
    options: ModelOptions,
    *,
    fallback: str,
    allow_unverified: bool,
    threads: int | None,
    overwrite: bool,
    drop_guilty: bool,
    as_json: bool,
    console: Console,
) -> int:
    """Export; return the exit code: 1 when the result does not agree with eager."""
    options = replace(
        options,
        fallback=_fallback(fallback),
        allow_unverified_branches=allow_unverified,
    )
    steps = Steps(console)
    done = export(model, output, plan, options, None, threads, overwrite, steps, drop_guilty)
    if as_json:
        print_json(_export_json(done, steps))
    else:
        print_report(_without(done.report, steps.shown), console)
        _print_where(done, console)
    return 0 if done.bundle is not None else 1


def _without(report: Report, shown: Collection[str]) -> Report:
    """A report without the notes that were shown when they were made."""
    return replace(report, notes=tuple(note for note in report.notes if note not in shown))


def _fallback(text: str) -> Fallback:
    if text not in FALLBACKS:
        raise UsageError(f"--fallback {text}: expected one of {', '.join(FALLBACKS)}")
    return cast(Fallback, text)


def _print_where(done: Export, console: Console) -> None:
    if done.bundle is None:
        if any(reason.startswith(UNVERIFIED) for reason in done.report.verdict.reasons):
            say(console, GIVE_INPUTS)
        line = f"nothing was published; the report is in {done.folder}"
    else:
        line = f"{done.folder}: {done.nodes} nodes, {done.size / 2**20:.1f} MiB"
    say(console, line)


def _export_json(done: Export, steps: Steps) -> dict[str, Any]:
    verdict = done.report.verdict
    return {
        "outcome": verdict.outcome,
        "engine": verdict.engine,
        "bundle": str(done.folder) if done.bundle is not None else None,
        "rejected": str(done.folder) if done.bundle is None else None,
        "verdict": msgspec.to_builtins(verdict),
        "precision": done.report.precision,
        "pipeline": done.report.pipeline,
        "emulation": msgspec.to_builtins(done.report.emulation),
        "fusions": msgspec.to_builtins(done.report.fusions),
        "nodes": done.nodes,
        "ops": dict(done.ops),
        "size": done.size,
        "seconds": dict(steps.seconds),
        "memory": _memory_json(steps.memory),
        "notes": list(done.report.notes),
        "layers": list(done.report.layers),
        **_capture_json(done),
        "bisection": None if done.bisection is None else done.bisection.to_json(),
        "dropped": [culprit.to_json() for culprit in done.dropped],
    }


def _capture_json(done: Export) -> dict[str, Any]:
    """How a published bundle was captured: as in its manifest."""
    if done.bundle is None:
        return {}
    manifest = done.bundle.manifest
    return {
        "capture": msgspec.to_builtins(manifest.capture),
        "guards": msgspec.to_builtins(manifest.guards),
        "quantization": msgspec.to_builtins(manifest.quantization),
        "engines": [
            {"target": engine.target, "file": engine.file, "outcome": engine.verdict.outcome}
            for engine in manifest.engines
        ],
    }


def _memory_json(steps: Mapping[str, int]) -> dict[str, Any]:
    """Bytes: the most that no file backs, also by step, and the most with mapped files."""
    return {
        "anonymous": max(steps.values(), default=0),
        "peak": peak_resident(),
        "steps": dict(steps),
    }


@results_apart()
def run_inspect(
    model: str,
    plan: Plan,
    options: ModelOptions,
    *,
    fallback: str,
    save_plan: Path | None,
    as_json: bool,
    console: Console,
) -> None:
    """Capture and plan; print.

    Raises:
        LoweringError: the target cannot express the program, said after everything else.
    """
    if save_plan is not None and not plan.quantized:
        raise UsageError(
            "--save-plan: nothing is quantised here", hint="It goes with --precision int8 or fp8."
        )
    options = replace(options, fallback=_fallback(fallback))
    source = open_model(model, options)
    try:
        prepared = prepare(source, options, Steps(console), given_plan(plan, source))
    except CaptureError as error:
        specs, _ = input_specs(source, options.inputs, options.dynamic)
        goes_on = falls_back(error, options)
        if goes_on:
            error.hint = (
                f"{error.hint} An export goes on with TorchScript (--fallback torchscript)."
            )
        _tell_flow(flow_of_refused(error, source, specs, goes_on=goes_on), error, as_json=as_json)
        raise
    try:
        found = inspect_model(prepared, plan)
    except VerificationError as error:  # the program fails on inputs that eager takes
        _tell_flow(flow_of(prepared), error, as_json=as_json)
        raise
    if save_plan is not None and found.quantization is not None:
        quantization.save_plan(save_plan, found.quantization, source)
    refusal = found.tensorrt.refusal if found.tensorrt is not None else None
    if not as_json:
        print_inspection(found, results())
    elif refusal is None:
        print_json(found.to_json())
    else:  # standard output gets one object, and that is the error's
        refusal.details |= found.to_json()
    if refusal is not None:
        raise refusal


def _tell_flow(found: list[dict[str, Any]], error: EnginecastError, *, as_json: bool) -> None:
    """Show what the model's code decides although nothing else can be said of it."""
    error.details["control_flow"] = found
    if not as_json:
        print_flow(found, results())


def list_passes(*, as_json: bool) -> None:
    """Every pass with its options, order and promise."""
    rows: list[dict[str, Any]] = []
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
        print_json({"passes": rows})
        return
    shown = table("pass", "what it does", "promise", "after", "options")
    for row in rows:
        options = "\n".join(f"{name}: {text}" for name, text in row["options"].items())
        shown.add_row(row["name"], row["summary"], row["promise"], "\n".join(row["after"]), options)
    results().print(shown)
