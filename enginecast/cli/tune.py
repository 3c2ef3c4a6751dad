"""`enginecast tune`: find how an engine runs fastest here.  It needs no torch of its own."""

from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from enginecast.cli.bench import shapes_text
from enginecast.cli.options.from_fields import (
    AsJson,
    BundleDir,
    Inputs,
    LoadFlags,
    Prompts,
    Quiet,
    grouped,
)
from enginecast.cli.terminal.output import (
    print_json,
    progress,
    results,
    results_apart,
    say,
)
from enginecast.verification.report.layout import print_table

if TYPE_CHECKING:
    from enginecast.bench.tune import Row, Tuning


@grouped
@results_apart()
def tune(
    bundle: BundleDir,
    how: LoadFlags,
    inputs: Inputs = None,
    prompts: Prompts = None,
    rounds: Annotated[
        int, typer.Option(metavar="N", min=3, help="Most samples in the final round.")
    ] = 15,
    seconds: Annotated[
        float, typer.Option(metavar="S", min=0.0, help="Rough time limit for all samples.")
    ] = 60.0,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Measure only; write nothing.")
    ] = False,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Find the fastest settings for an engine on this machine.

    Later runs use them, and so does `load`.
    """
    from enginecast.bench.tune import tune_bundle

    console = progress(quiet)
    found = tune_bundle(
        bundle,
        inputs=inputs,
        prompts=prompts,
        rounds=rounds,
        seconds=seconds,
        write=not dry_run,
        say=lambda text: say(console, text),
        **how.arguments(),
    )
    if as_json:
        print_json(_as_json(found))
        return
    out = results()
    columns = ["ms", "CPU ms", "speed", "quartiles", "error", "setting"]
    rows = (*found.rows, *found.others)
    print_table(out, columns, map(_cells, rows), whole=5, title=5)
    for row in rows:
        if row.rejected:
            say(out, f"never chosen: {row.label}: {row.rejected}")
    say(out, f"inputs: {found.inputs}: {shapes_text(found.shapes)}")
    for note in found.notes:
        say(out, note)
    say(out, f"{found.backend}, speeds and their quartiles over the default in the same rounds")
    chosen = f"chosen: {found.chosen.settings}"
    chosen += f", {found.chosen.speed:.2f}x" if found.chosen.is_better else ": no other is faster"
    say(out, chosen if found.file is None else f"{chosen}; written to {found.file}")
    for row in found.others:
        if row.is_better and row.speed > found.chosen.speed:
            say(out, f"{row.label} is {row.speed:.2f}x: --prefer {row.label} takes and tunes it")


def _cells(row: "Row") -> list[str]:
    error = "" if row.accuracy is None else f"{row.accuracy.relative:.2g}"
    if row.times is None or row.speeds is None:
        return ["", "", "", "", error, row.label]
    low, high = row.speeds.spread
    times = [f"{row.times.median:.3g}", f"{row.times.median_cpu:.3g}"]
    return [*times, f"{row.speed:.2f}x", f"{low:.2f}-{high:.2f}", error, row.label]


def _as_json(found: "Tuning") -> dict[str, Any]:
    return {
        "rows": [_row_json(row) for row in found.rows],
        "others": [_row_json(row) | {"backend": row.backend} for row in found.others],
        "chosen": _row_json(found.chosen),
        "file": None if found.file is None else str(found.file),
        "backend": found.backend,
        "inputs": found.inputs,
        "shapes": [{n: list(s) for n, s in each.items()} for each in found.shapes],
        "notes": list(found.notes),
        "machine": msgspec.to_builtins(found.machine),
    }


def _row_json(row: "Row") -> dict[str, Any]:
    measured: dict[str, Any] = {}
    if row.times is not None and row.speeds is not None:
        measured = {
            "ms": row.times.median,
            "quartiles_ms": list(row.times.spread),
            "cpu_ms": row.times.median_cpu,
            "speed": row.speed,
            "quartiles_speed": list(row.speeds.spread),
            "rounds": len(row.times.wall),
        }
    accuracy = row.accuracy
    return {
        "settings": msgspec.to_builtins(row.settings),
        **measured,
        "cosine": None if accuracy is None else accuracy.cosine,
        "relative_error": None if accuracy is None else accuracy.relative,
        "rejected": row.rejected or None,
    }
