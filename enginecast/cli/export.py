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
    grouped,
    located,
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
from enginecast.runtime.bundle.staging import require_target

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
    download: Download = False,
    no_speed: Annotated[
        bool,
        typer.Option(
            "--no-speed",
            help="Skip timing the engine against eager.",
            rich_help_panel="Verification",
        ),
    ] = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
    verbose: Annotated[
        int,
        typer.Option(
            "--verbose",
            "-v",
            count=True,
            help="Show the log, and tables of accuracy, passes and fusions.",
            show_default=False,
        ),
    ] = 0,
) -> None:
    """Export an engine, compare it with eager, publish a bundle."""
    show_log(verbose)
    request.check()
    require_target(output, overwrite=request.overwrite)
    model = located(model, download=download)
    loading()
    from enginecast.bench.export import export_timing
    from enginecast.compiler.export import session
    from enginecast.compiler.steps import Steps

    request = replace(request, model=model, command=command_line())
    console = progress(quiet)
    steps = Steps(console)
    measure = None
    if not no_speed:
        prompts = request.options.prompts
        for_size = request.optimize == "size"
        measure = partial(
            export_timing, threads=request.threads, prompts=prompts, for_size=for_size
        )
    done = session.export(request, steps, measure)
    if as_json:
        speed = None if done.speed is None else done.speed.to_json()
        print_json({**_as_json(done, steps), "speed": speed})
    elif quiet:
        _show_verdict(done)
    else:
        _show(done, steps, tables=bool(verbose), timed=measure is not None)
    raise typer.Exit(0 if done.bundle is not None else 1)


def _show_verdict(done: "Export") -> None:
    from enginecast.verification.report.tables import print_downgrades, print_verdict

    report = done.report
    print_verdict(report.verdict, report.floor_dtype, results(), tables=False, timed=report.timed)
    print_downgrades(done.report.downgrades, results())
    _show_folder(done)


def _show(done: "Export", steps: "Steps", *, tables: bool, timed: bool) -> None:
    """Everything but the notes that were shown when they were made."""
    from enginecast.verification.report.files import HTML_NAME
    from enginecast.verification.report.tables import print_report, print_summary

    console, report = results(), done.report
    if tables:
        fresh = tuple(note for note in report.notes if note not in steps.shown)
        print_report(replace(report, notes=fresh), console)
    else:
        fresh = tuple(note for note in done.notable if note not in steps.shown)
        print_summary(replace(report, notes=fresh), console)
    if done.bundle is not None:
        say(console, _engine_line(done))
    _show_folder(done)
    if done.bundle is None:
        return
    if timed:
        say(console, f"speed: {done.speed or _why_untimed(done)}")
    say(console, f"report: {_from_here(done.folder / HTML_NAME)}")


def _from_here(path: Path) -> Path:
    """A path as short as the user would write it."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


def _show_folder(done: "Export") -> None:
    console = results()
    if done.bundle is not None:
        say(console, f"{_from_here(done.folder)}: {done.nodes} nodes, {done.size / 2**20:.1f} MiB")
        return
    if done.withheld:
        for line in _ways_out(done):
            say(console, line)
        return
    if any(reason.startswith("unverified branch") for reason in done.report.verdict.reasons):
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


def _engine_line(done: "Export") -> str:
    """What an export made: target, precision, sizes that vary, and what is fused."""
    assert done.bundle is not None
    config, manifest, report = done.candidate.config, done.bundle.manifest, done.report
    ranges = [
        f"{name} {least}..{most}"
        + (f" in steps of {manifest.steps[name]}" if name in manifest.steps else "")
        for name, (least, most) in manifest.symbols.items()
    ]
    varying = f"{' and '.join(ranges)} var{'ies' if len(ranges) == 1 else 'y'}"
    parts = [varying if ranges else "all sizes are fixed (--dynamic lets them vary)"]
    fused = [
        f"{each.engine}{'' if each.engine == each.expected else f' of {each.expected}'} {each.kind}"
        for each in report.fusions
    ]
    parts += [f"fused: {', '.join(fused)}"] if fused else []
    device = {"cpu": " on the CPU", "cuda": " on a GPU"}[config.device]
    where = f"{config.target}{device if report.verdict.engine == 'ran' else ''}"
    return f"engine: {report.precision} for {where}; {'; '.join(parts)}"


def _why_untimed(done: "Export") -> str:
    """Why an engine was not timed beside eager."""
    if done.report.verdict.engine != "ran":
        precision, provider = done.candidate.config.precision, done.report.verdict.where.provider
        if provider.startswith("CPU"):
            return (
                f"not timed: {provider} computes {precision} in fp32, with casts between, which"
                f" says nothing of hardware that computes in {precision}"
            )
        return f"not timed: the engine has not run on hardware that computes in {precision}"
    return "not timed here; `enginecast bench` times it"


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
