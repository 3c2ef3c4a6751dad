"""Shows a report: tables on a terminal, `report.json`, and one static `report.html`."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from enginecast.runtime.manifest import Fusion, OutputVerdict, Verdict
from enginecast.verify.metrics import BEYOND
from enginecast.verify.report_data import PassCheck, Report
from enginecast.verify.report_emulation import print_emulation
from enginecast.verify.report_page import render_page
from enginecast.verify.verdict import times, verdict_line

JSON_NAME = "report.json"
HTML_NAME = "report.html"


def write_report(folder: Path, report: Report) -> tuple[Path, Path]:
    """Write `report.json` and `report.html` into a folder; return their paths."""
    as_json, as_html = folder / JSON_NAME, folder / HTML_NAME
    as_json.write_text(to_json(report), encoding="utf-8")
    as_html.write_text(
        render_page(report, verdict_line(report.verdict, report.floor_dtype)), encoding="utf-8"
    )
    return as_json, as_html


def to_json(report: Report) -> str:
    """All of a report; the same text for the same report."""
    content = msgspec.to_builtins(report)
    return json.dumps(content, sort_keys=True, indent=1, allow_nan=False) + "\n"


def print_report(report: Report, console: Console) -> None:
    """Print the verdict and, where there are any, the tables of passes and fusions."""
    print_verdict(report.verdict, report.floor_dtype, console)
    for target, verdict in report.others.items():
        console.print(
            f"{target}: {verdict_line(verdict, report.floor_dtype)}", markup=False, highlight=False
        )
    if report.passes:
        console.print(_passes_table(report.passes))
    if report.fusions:
        console.print(_fusions_table(report.fusions))
    if report.emulation is not None:
        print_emulation(report.emulation, console)
    for line in (*report.layers, *report.notes):
        console.print(line, markup=False, highlight=False)


def print_verdict(verdict: Verdict, dtype: str, console: Console) -> None:
    """Print how every output was judged, then the verdict and its reasons.

    Args:
        dtype: of the noise floor.
    """
    console.print(_outputs_table(verdict.outputs, dtype))
    style = "bold red" if verdict.outcome == "rejected" else "bold green"
    console.print(verdict_line(verdict, dtype), style=style, markup=False, highlight=False)
    shown = verdict.reasons[1:] if verdict.outcome == "rejected" else verdict.reasons
    for reason in shown:
        console.print(f"  {reason}", markup=False, highlight=False)


def _outputs_table(outputs: Iterable[OutputVerdict], dtype: str) -> Table:
    table = _table(
        "output",
        f"error / eager {dtype}'s",
        "limit",
        "relative L2",
        "cosine",
        "prompt cosine",
        "SQNR dB",
        "pad rows",
    )
    for output in outputs:
        table.add_row(
            output.name,
            times(output.ratio) if output.ratio is not None else "no finite values",
            _or_dash(output.limit, times),
            _or_dash(output.error, "{:.2e}".format),
            _or_dash(output.cosine, "{:.7f}".format),
            _or_dash(output.prompt_cosine, "{:.7f}".format),
            _or_dash(output.sqnr_db, "{:.1f}".format),
            _or_dash(output.pad_error, "{:.2e}".format),
        )
    return table


def _passes_table(passes: Iterable[PassCheck]) -> Table:
    table = _table("pass", "done", "left", "error", "worst place")
    for check in passes:
        place = f"{check.worst_place} {check.worst_source}".strip()
        table.add_row(
            check.name,
            str(check.rewritten),
            str(check.left_alone),
            _error(check),
            place,
        )
    return table


def _error(check: PassCheck) -> str:
    """The worst error of a pass as people read it."""
    if check.worst_error >= BEYOND:
        text = "not finite"
    else:
        text = "equal" if check.worst_error == 0 else f"{check.worst_error:.2e}"
    return f"{text} BROKEN" if check.failure else text


def _fusions_table(fusions: Iterable[Fusion]) -> Table:
    table = _table("fusion", "expected", "program", "engine", "runtime", "missing")
    for fusion in fusions:
        table.add_row(
            fusion.kind,
            str(fusion.expected),
            str(fusion.program),
            str(fusion.engine),
            "-" if fusion.runtime is None else str(fusion.runtime),
            "\n".join(fusion.missing),
        )
    return table


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left", no_wrap=index == 0, overflow="fold")
    return table


def _or_dash(value: float | None, show: Callable[[float], str]) -> str:
    return "-" if value is None else show(value)
