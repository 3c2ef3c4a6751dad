"""The tables of a report, and their terminal form."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from rich.console import Console

from enginecast.runtime.bundle.manifest import (
    Downgrade,
    Fusion,
    Input,
    Output,
    OutputVerdict,
    Verdict,
)
from enginecast.verification.emulate.data import Emulation, StoredValues, WeightLoss, tightest
from enginecast.verification.metrics import BEYOND, times
from enginecast.verification.report.data import (
    PassCheck,
    PlannedLayer,
    Report,
    StoredWeights,
)
from enginecast.verification.report.layout import print_table
from enginecast.verification.report.speed import Speed, SpeedAt
from enginecast.verification.verdict import verdict_line

HOW = (
    *("the engine ran on ", "the engine file ran on ", "the engine has not run"),
    *("the program was judged in ", "eager fp32+"),
)
"""Beginnings of reasons that say how a verdict was reached, which its line says in short."""
SHOWN = 3
"""Modules in the table on a terminal, and that are named in a cell; report.json has all."""


@dataclass(frozen=True)
class Column:
    """What a table shows of each of its rows; the first column names them."""

    title: str
    cell: Callable[[Any], str]
    page_only: bool = False
    """Where there is room."""
    is_bad: Callable[[Any], bool] = lambda row: False
    """Whether the page marks the cell."""
    is_wide: bool = False
    """Whether it holds sentences."""
    value: Callable[[Any], float | None] = lambda row: None
    """What the page sorts by; None: by the text."""

    def look(self, row: Any) -> str:
        """The classes of a cell on the page."""
        return " ".join(["bad"] * bool(self.is_bad(row)) + ["wide"] * self.is_wide)


@dataclass(frozen=True)
class ReportTable:
    """A table for the terminal and for the page."""

    rows: Sequence[Any]
    columns: Sequence[Column]


def print_summary(report: Report, console: Console) -> None:
    """Print the verdict, and what it takes to understand it: of a rejection every reason, and where
    values overflow; last, what the engine lacks.
    """
    is_rejected = report.verdict.outcome == "rejected"
    verdict = report.verdict
    if not is_rejected:
        told = tuple(reason for reason in verdict.reasons if not reason.startswith(HOW))
        verdict = msgspec.structs.replace(verdict, reasons=told)
    print_verdict(verdict, report.floor_dtype, console, tables=False, timed=report.timed)
    _print_others(report, console)
    if is_rejected and report.emulation is not None:
        print_emulation(report.emulation, console)
    lacking = {each.text for each in report.downgrades}
    for note in report.notes:
        if note not in lacking:
            _print_line(note, console)
    print_downgrades(report.downgrades, console)


def print_report(report: Report, console: Console, machine: str = "this machine") -> None:
    """Print the verdict and, where there are any, the tables of passes and fusions; last, what the
    engine lacks.

    Args:
        machine: what to call the one of the export.
    """
    verdict, timed = report.verdict, report.timed
    print_verdict(verdict, report.floor_dtype, console, timed=timed, machine=machine)
    _print_others(report, console)
    busy = [check for check in report.passes if not _is_idle(check)]
    if busy:
        _print_table(passes_table(busy), console)
    if idle := [check.name for check in report.passes if _is_idle(check)]:
        _print_line(f"nothing to do for {', '.join(idle)}", console)
    if report.fusions:
        _print_table(fusions_table(report.fusions), console)
    if report.emulation is not None:
        print_emulation(report.emulation, console)
    lacking = {each.text for each in report.downgrades}
    for line in (*report.layers, *(note for note in report.notes if note not in lacking)):
        _print_line(line, console)
    print_downgrades(report.downgrades, console)


def _print_others(report: Report, console: Console) -> None:
    for target, verdict in report.others.items():
        _print_line(f"{target}: {verdict_line(verdict, report.floor_dtype)}", console)


def _is_idle(check: PassCheck) -> bool:
    return not (check.rewritten or check.left_alone or check.failure)


def print_verdict(
    verdict: Verdict,
    dtype: str,
    console: Console,
    *,
    tables: bool = True,
    timed: Speed | None = None,
    machine: str = "this machine",
) -> None:
    """Print how every output was judged (in a table), then the verdict and its reasons; first of
    all that the engine is slower than in fp32, where it is.
    """
    but = "" if timed is None else timed.slower_than_fp32(machine)
    line = verdict_line(verdict, dtype, but)
    is_rejected = verdict.outcome == "rejected"
    style = "bold red" if is_rejected else "bold yellow" if but else "bold green"
    if but:
        _print_line(line, console, style)
    if but and timed is not None and timed.advice:
        _print_line(f"  {timed.advice}", console, "yellow")
    if tables:
        _print_table(outputs_table(verdict.outputs, dtype), console)
    if not but:
        _print_line(line, console, style)
    for reason in verdict.reasons[1:] if is_rejected else verdict.reasons:
        _print_line(f"  {reason}", console)


def print_downgrades(downgrades: Sequence[Downgrade], console: Console) -> None:
    """Print a line for each thing that an engine lacks."""
    for each in downgrades:
        _print_line(downgrade_line(each), console, "yellow")


def downgrade_line(found: Downgrade) -> str:
    """What an engine lacks, in a line: "sizes: x_1 is fixed at 16: ..."."""
    is_accepted = found.consent == "given"
    return f"{found.kind}: {found.text}{' (accepted)' if is_accepted else ''}"


def print_emulation(emulation: Emulation, console: Console) -> None:
    """Print the modules with the least headroom, and where values overflow first."""
    heading = f"as {emulation.profile} computes: {emulation.summary}"
    console.print(heading, markup=False, highlight=False, soft_wrap=True)
    _print_table(modules_table(tightest(emulation, SHOWN), "least headroom"), console)


def _print_line(line: str, console: Console, style: str | None = None) -> None:
    console.print(line, style=style, markup=False, highlight=False, soft_wrap=True)


def _print_table(table: ReportTable, console: Console) -> None:
    shown = [column for column in table.columns if not column.page_only]
    rows = [[column.cell(row) for column in shown] for row in table.rows]
    print_table(console, [column.title for column in shown], rows)


def _of(name: str, form: str = "{}") -> Callable[[Any], str]:
    """A cell with an attribute of its row; a dash for None."""

    def cell(row: Any) -> str:
        value = getattr(row, name)
        return "-" if value is None else form.format(value)

    return cell


def outputs_table(outputs: Sequence[OutputVerdict], dtype: str) -> ReportTable:
    columns = (
        Column("output", _of("name")),
        Column(
            f"error / eager {dtype}'s",
            lambda row: "no finite values" if row.ratio is None else times(row.ratio),
            is_bad=lambda row: row.ratio is None or row.ratio > row.limit,
        ),
        Column("limit", lambda row: "-" if row.limit is None else times(row.limit)),
        Column("relative L2", _of("error", "{:.2e}")),
        Column("floor", _of("floor", "{:.2e}"), page_only=True),
        Column("cosine", _of("cosine", "{:.7f}")),
        Column("prompt cosine", _of("prompt_cosine", "{:.7f}")),
        Column("SQNR dB", _of("sqnr_db", "{:.1f}")),
        Column("largest difference", _of("max_abs", "{:.2e}"), page_only=True),
        Column("pad rows", _of("pad_error", "{:.2e}")),
    )
    return ReportTable(outputs, columns)


def passes_table(passes: Sequence[PassCheck]) -> ReportTable:
    columns = (
        Column("pass", _of("name")),
        Column("promise", _of("promise"), page_only=True),
        Column("done", _of("rewritten")),
        Column("left", _of("left_alone")),
        Column("seconds", _of("seconds", "{:.2f}"), page_only=True),
        Column(
            "error",
            _error,
            is_bad=lambda row: bool(row.failure) or row.worst_error is None,
        ),
        Column(
            "worst place",
            lambda row: (
                "" if row.worst_error == 0 else f"{row.worst_place} {row.worst_source}".strip()
            ),
            is_wide=True,
        ),
        Column("found", _found, page_only=True, is_wide=True),
    )
    return ReportTable(passes, columns)


def _error(check: PassCheck) -> str:
    """The worst error of a pass as people read it."""
    error = check.worst_error
    if error is None:
        text = "not finite"
    elif error >= BEYOND:  # of something that is zero in fp64; of NaN in reports of version 1
        text = "beyond measure"
    else:
        text = "equal" if error == 0 else f"{error:.2e}"
    return f"{text} BROKEN" if check.failure else text


def _found(check: PassCheck) -> str:
    named = ", ".join(check.moved[:SHOWN])
    more = len(check.moved) - SHOWN
    named = f"{named} and {more} more" if more > 0 else named
    moved = f"other values now leave {named}" if check.moved else ""
    return "\n".join(filter(None, (check.failure, moved)))


def fusions_table(fusions: Sequence[Fusion]) -> ReportTable:
    names = ("kind", "expected", "program", "engine", "runtime")
    columns = [Column("fusion" if name == "kind" else name, _of(name)) for name in names]
    missing = Column("missing", lambda row: "\n".join(row.missing), is_wide=True)
    return ReportTable(fusions, (*columns, missing))


def modules_table(modules: Sequence[StoredValues], title: str) -> ReportTable:
    columns = (
        Column(title, lambda row: f"{row.module or 'the model itself'} {row.source}".strip()),
        Column("largest", _of("max_abs", "{:.4g}")),
        Column("bits", _of("headroom_bits", "{:.1f}"), is_bad=lambda row: row.overflow > 0),
        Column("overflow", _of("overflow"), is_bad=lambda row: row.overflow > 0),
        Column("clamped", _of("clamped"), is_bad=lambda row: row.clamped > 0),
        Column("subnormal", _of("subnormal", "{:.2%}"), page_only=True),
        Column("energy lost", _of("energy_lost", "{:.2e}"), page_only=True),
        Column("SQNR dB", _of("sqnr_db", "{:.1f}")),
        Column("op", _of("op"), page_only=True),
    )
    return ReportTable(modules, columns)


def weights_table(weights: Sequence[WeightLoss]) -> ReportTable:
    columns = (
        Column("weight", _of("name")),
        Column("largest", _of("max_abs", "{:.4g}")),
        Column("overflow", _of("overflow"), is_bad=lambda row: row.overflow > 0),
        Column("subnormal", _of("subnormal", "{:.2%}")),
        Column("energy lost", _of("energy_lost", "{:.2e}")),
    )
    return ReportTable(weights, columns)


def plan_table(layers: Sequence[PlannedLayer]) -> ReportTable:
    columns = (
        Column("layer", lambda row: row.module or row.kind),
        Column("choice", _choice),
        Column("shape", lambda row: " x ".join(map(str, row.shape))),
        Column("before", lambda row: size(row.bytes_before), value=lambda row: row.bytes_before),
        Column("after", lambda row: size(row.bytes), value=lambda row: row.bytes),
        Column("error", _of("error", "{:.2e}")),
        Column("end to end", _of("end_to_end", "{:.2e}")),
        Column(
            "gain",
            lambda row: (
                "-"
                if row.gain is None
                else f"{row.gain:.2f}x {row.gain_from}{', slower' * _is_loss(row)}".strip()
            ),
            value=lambda row: row.gain,
            is_bad=lambda row: _is_loss(row),
        ),
        Column("why", _of("reason"), is_wide=True),
    )
    return ReportTable(layers, columns)


def _is_loss(layer: PlannedLayer) -> bool:
    """Whether a layer is slower than what it replaces."""
    return layer.choice != "keep" and layer.gain is not None and layer.gain < 1


def speed_table(cases: Sequence[SpeedAt]) -> ReportTable:
    def taken(name: str) -> Callable[[Any], str]:
        return lambda row: f"{row.milliseconds[name]:.3g}"

    names = {"engine": "engine ms", "eager": "eager fp32 ms", "fp32": "fp32 engine ms"}
    shown = [name for name in names if name in cases[0].milliseconds]
    columns = [Column("sizes", _of("sizes")), *(Column(names[n], taken(n)) for n in shown)]
    columns.append(Column("times as fast as eager", _of("eager", "{:.2f}x")))
    if cases[0].fp32 is not None:
        columns.append(
            Column(
                "times as fast as the fp32 engine",
                lambda row: f"{row.fp32:.2f}x{', slower' * row.is_slower}",
                is_bad=lambda row: row.is_slower,
            )
        )
    return ReportTable(cases, columns)


def signature_table(report: Report) -> ReportTable:
    """Inputs and outputs, with the ranges of their sizes and values."""

    def shape(row: Input | Output) -> str:
        sizes = (
            f"{dim} {'..'.join(map(str, report.symbols[dim]))}"
            if isinstance(dim, str) and dim in report.symbols
            else str(dim)
            for dim in row.shape
        )
        return f"[{', '.join(sizes)}]"

    def values(row: Input | Output) -> str:
        if isinstance(row, Output) or row.minimum is None or row.maximum is None:
            return "any" if isinstance(row, Input) else "-"
        return f"{row.minimum:g}..{row.maximum:g}"

    columns = (
        Column("name", _of("name")),
        Column("", lambda row: "output" if isinstance(row, Output) else "input"),
        Column("dtype", _of("dtype")),
        Column("sizes", shape),
        Column("values", values),
    )
    return ReportTable((*report.inputs, *report.outputs), columns)


def stored_table(stored: Sequence[StoredWeights]) -> ReportTable:
    columns = (
        Column("module", lambda row: row.module or "the model itself"),
        Column("precision", _of("precision")),
        Column("weights", lambda row: size(row.bytes), value=lambda row: row.bytes),
    )
    return ReportTable(stored, columns)


def _choice(layer: PlannedLayer) -> str:
    if layer.choice == "keep":
        return "keep"
    bits = f", {layer.bits} bits" if layer.bits != 8 else ""
    return f"{layer.choice}{bits}, a scale a {layer.scaling}"


def size(count: int) -> str:
    """Bytes as people read them, in powers of 1024."""
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if count >= 1 << power:
            return f"{count / (1 << power):.1f} {unit}"
    return f"{count} B"
