"""`enginecast bench`: time an engine, and other ways to run its model.  Peers need torch."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from enginecast.cli.options.from_fields import (
    AsJson,
    Download,
    Inputs,
    Prompts,
    Quiet,
    RandomWeights,
    RunFlags,
    fetched,
    grouped,
    refuse_given,
)
from enginecast.cli.options.pipeline_folders import EnginesDir, of_pipelines
from enginecast.cli.terminal.output import (
    print_json,
    progress,
    results,
    results_apart,
    say,
)
from enginecast.runtime.sessions.settings import Settings
from enginecast.verification.report.layout import print_table

if TYPE_CHECKING:
    from enginecast.bench.bundle import Bench, Row

OF_MODEL = {"random_weights", "download"}


@grouped
@results_apart()
@of_pipelines(alone=("inputs", "prompts"))
def bench(
    context: typer.Context,
    bundle: EnginesDir,
    how: RunFlags,
    model: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="Model the bundle was made from, for --against."),
    ] = None,
    against: Annotated[
        str,
        typer.Option(
            metavar="NAME,...",
            help="Also time: eager, compile, onnx.",
        ),
    ] = "",
    random_weights: RandomWeights = None,
    download: Download = False,
    inputs: Inputs = None,
    prompts: Prompts = None,
    rounds: Annotated[int, typer.Option(metavar="N", min=3, help="Most samples of each.")] = 15,
    seconds: Annotated[
        float, typer.Option(metavar="S", min=0.0, help="Rough time limit for all samples.")
    ] = 60.0,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Time an engine against other ways to run its model."""
    from enginecast.bench.bundle import bench_bundle

    if model is None:
        hint = "Give both, or leave them out."
        refuse_given(context, OF_MODEL, "only with --model MODEL --against NAME", hint=hint)
    console = progress(quiet)
    found = bench_bundle(
        bundle,
        model=fetched(model) if download and model else model,
        against=[name.strip() for name in against.split(",") if name.strip()],
        inputs=inputs,
        prompts=prompts,
        rounds=rounds,
        seconds=seconds,
        random_weights=random_weights,
        say=lambda text: say(console, text),
        **how.arguments(),
    )
    if as_json:
        print_json(_as_json(found))
        return
    out = results()
    columns = ["", "ms", "quartiles", "CPU ms", "speed", "items/s", "MB"]
    columns += ["cosine", "error"] if found.compared else []
    print_table(out, columns, map(_cells, found.rows))
    for line in found.absent:
        say(out, f"not timed: {line}")
    say(out, f"inputs: {found.inputs}: {shapes_text(found.shapes)}")
    if found.compared:
        say(out, f"cosine (lowest of a row) and relative error: against {found.compared}")
    threads = {None: "threads as by default", 1: "1 thread"}.get(
        found.threads, f"{found.threads} threads"
    )
    rounds_made = len(found.rows[0].times.wall)
    say(out, f"{found.backend}, {threads}, medians of {rounds_made} rounds in turns")
    if found.settings != Settings(threads=found.threads):
        say(out, f"the engine as tuned: {found.settings}")
    for note in found.notes:
        say(out, note)


def _cells(row: "Row") -> list[str]:
    times = row.times
    low, high = times.spread
    cells = [row.name, f"{times.median:.3g}", f"{low:.3g}-{high:.3g}", f"{times.median_cpu:.3g}"]
    cells += [f"{row.ratio:.2f}x", f"{row.items:.4g}", f"{row.memory / 1e6:.0f}"]
    if row.accuracy is not None:
        cells += [f"{row.accuracy.cosine:.6f}", f"{row.accuracy.relative:.2g}"]
    return cells


def shapes_text(calls: "Sequence[dict[str, tuple[int, ...]]]") -> str:
    """The shapes of each call."""
    texts = [", ".join(f"{name} {list(shape)}" for name, shape in each.items()) for each in calls]
    return "; ".join(texts)


def _as_json(found: "Bench") -> dict[str, Any]:
    return {
        "rows": {
            row.name: {
                "ms": row.times.median,
                "quartiles_ms": list(row.times.spread),
                "cpu_ms": row.times.median_cpu,
                "samples_ms": list(row.times.wall),
                "speed": row.ratio,
                "items_per_second": row.items,
                "memory_bytes": row.memory,
                "cosine": None if row.accuracy is None else row.accuracy.cosine,
                "relative_error": None if row.accuracy is None else row.accuracy.relative,
            }
            for row in found.rows
        },
        "base": found.rows[0].name,
        "absent": list(found.absent),
        "inputs": found.inputs,
        "shapes": [{n: list(s) for n, s in each.items()} for each in found.shapes],
        "compared_with": found.compared or None,
        "backend": found.backend,
        "threads": found.threads,
        "settings": msgspec.to_builtins(found.settings),
        "notes": list(found.notes),
        "machine": dict(found.machine),
    }
