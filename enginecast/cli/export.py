"""`enginecast export`: make an engine, compare it with eager, publish a bundle."""

import shlex
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from enginecast.cli.options.from_fields import (
    AsJson,
    Download,
    Model,
    Quiet,
    Verbose,
    fetched,
    grouped,
)
from enginecast.cli.terminal.output import (
    command_line,
    loading,
    print_json,
    progress,
    results,
    results_apart,
    say,
    show_log,
)
from enginecast.compiler.request import ExportRequest
from enginecast.errors import UsageError
from enginecast.exporters.aotinductor.options import AOTInductorOptions
from enginecast.exporters.tensorrt.options import TensorRTOptions

if TYPE_CHECKING:
    from enginecast.compiler.publication.bundle import Export
    from enginecast.compiler.steps import Steps

GIVE_INPUTS = (
    "Give inputs that take the other path (--inputs FILE), or accept it:"
    " --allow-unverified-branches."
)

REPORTED = (
    *("verdict", "precision", "pipeline", "emulation", "fusions", "notes", "downgrades", "layers"),
)
"""What `--json` has of the report."""


@grouped
@results_apart()
def export(
    model: Model,
    output: Annotated[Path, typer.Option("-o", "--output", metavar="DIR", help="New bundle.")],
    request: ExportRequest,
    tensorrt: TensorRTOptions | None,
    aotinductor: AOTInductorOptions | None,
    download: Download = False,
    no_speed: Annotated[
        bool, typer.Option("--no-speed", help="Skip timing the engine against eager.")
    ] = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = 0,
) -> None:
    """Export an engine, compare it with eager, publish a bundle."""
    show_log(verbose)
    loading()
    from enginecast.bench.export import export_timing
    from enginecast.compiler.export import session
    from enginecast.compiler.steps import Steps

    if tensorrt and aotinductor:
        raise UsageError("--regional is for --target aotinductor, and --trt-... for another")
    request = replace(
        request,
        model=fetched(model) if download else model,
        target_options=tensorrt or aotinductor,
        command=command_line(),
    )
    console = progress(quiet)
    steps = Steps(console)
    measure = None if no_speed else partial(export_timing, threads=request.threads)
    done = session.export(request, steps, measure)
    if as_json:
        speed = None if done.speed is None else done.speed.to_json()
        print_json({**_as_json(done, steps), "speed": speed})
    else:
        _show(done, steps, quiet)
        if done.speed is not None and not quiet:
            say(results(), f"{done.speed} (`enginecast bench` says more)")
    raise typer.Exit(0 if done.bundle is not None else 1)


def _show(done: "Export", steps: "Steps", quiet: bool) -> None:
    """Everything but the notes that were shown when they were made; of quiet the verdict and what
    the engine lacks.
    """
    from enginecast.verification.report.tables import (
        print_downgrades,
        print_report,
        print_verdict,
    )

    console, report = results(), done.report
    if quiet:
        print_verdict(report.verdict, report.floor_dtype, console, tables=False)
        print_downgrades(report.downgrades, console)
    else:
        fresh = tuple(note for note in report.notes if note not in steps.shown)
        print_report(replace(report, notes=fresh), console)
    if done.bundle is not None:
        say(console, f"{done.folder}: {done.nodes} nodes, {done.size / 2**20:.1f} MiB")
        return
    if done.withheld:
        for line in _ways_out(done):
            say(console, line)
        return
    if any(reason.startswith("unverified branch") for reason in report.verdict.reasons):
        say(console, GIVE_INPUTS)
    say(console, f"nothing was published; the report is in {done.folder}")


def _ways_out(done: "Export") -> list[str]:
    """How to accept a bundle that was not published for what it lacks."""
    target = done.folder.with_name(done.folder.name.removesuffix(".rejected"))
    own = dict.fromkeys(each.option for each in done.withheld if each.option)
    ways = [f"export again with {' '.join(own)} or --allow-fallback"]
    if not target.exists():
        ways.insert(0, shlex.join(("mv", str(done.folder), str(target))))
    return [
        f"not published, for it lacks what was asked for; the bundle is in {done.folder}",
        f"to accept it: {', or '.join(ways)}",
    ]


def _as_json(done: "Export", steps: "Steps") -> dict[str, Any]:
    from enginecast.compiler.memory import peak_resident

    verdict, rewritten = done.report.verdict, done.candidate.rewritten
    dropped = () if rewritten is None else rewritten.dropped
    report = msgspec.to_builtins(done.report)
    captured: dict[str, Any] = {}
    if done.bundle is not None:  # as in its manifest
        manifest = done.bundle.manifest
        names = ("capture", "guards", "size_checks", "quantization")
        captured = {name: msgspec.to_builtins(getattr(manifest, name)) for name in names}
        captured["engines"] = [
            {"target": engine.target, "file": engine.file, "outcome": engine.verdict.outcome}
            for engine in manifest.engines
        ]
    return {
        "outcome": verdict.outcome,
        "engine": verdict.engine,
        "bundle": str(done.folder) if done.bundle is not None else None,
        "rejected": str(done.folder) if done.bundle is None else None,
        **{name: report[name] for name in REPORTED},
        "nodes": done.nodes,
        "ops": dict(done.ops),
        "size": done.size,
        "seconds": dict(steps.seconds),
        # Bytes: the most that no file backs, also by step, and the most with mapped files.
        "memory": {
            "anonymous": max(steps.memory.values(), default=0),
            "peak": peak_resident(),
            "steps": dict(steps.memory),
        },
        **captured,
        "bisection": None if done.bisection is None else done.bisection.to_json(),
        "dropped": [culprit.to_json() for culprit in dropped],
    }
