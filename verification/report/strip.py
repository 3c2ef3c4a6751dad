"""Draw the error strip: for each pass, the error of every module after it, on one axis.

A bar is a module, in order of execution; its height is the error on a logarithmic axis. What is
equal has no bar, and what is not finite has a color that no error has.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

from enginecast.verification.metrics import BEYOND
from enginecast.verification.report.data import PassCheck, Report
from enginecast.verification.report.html import Html, join, tag

BARS = 400
"""Most bars of a row; of more modules, neighbors share one."""
SHOWN, ROWS = 4, 12
"""Rows that are shown, and with those that fold open."""
LEAST, MOST = -16, 4
"""Powers of ten that the axis may reach."""
LABELS = 26
"""Most labels of blocks of one kind; of more, every second one or fewer is labeled."""

PALE, DARK = -8, 0
"""Powers of ten between which the color of an error goes from pale to dark."""
_STOPS = (
    (0.0, (150, 200, 235)),
    (0.45, (80, 128, 205)),
    (0.75, (226, 140, 72)),
    (1.0, (186, 56, 28)),
)

NARROW = 0.06
"""Part of the width from which on a name fits below its bars."""

Errors = Mapping[str, float | None]


@dataclass(frozen=True)
class Row:
    """The errors of all modules after one pass."""

    name: str
    note: str
    errors: Errors
    alike: tuple[str, ...] = ()
    """Passes that left it as it was."""


@dataclass(frozen=True)
class Axis:
    """Powers of ten at the bottom and the top."""

    low: int
    high: int

    def height(self, error: float) -> float:
        """Where an error stands, from 0 to 100; a little above 0 for the least."""
        if error <= 0:
            return 0.0
        share = (math.log10(error) - self.low) / (self.high - self.low)
        return 4 + 96 * min(1.0, max(0.0, share))

    @property
    def ticks(self) -> list[int]:
        step = max(1, math.ceil((self.high - self.low) / 4))
        return list(range(self.low, self.high + 1, step))


def rows_of(report: Report) -> list[Row]:
    """A row for each pass that changed an error, and one for the arithmetic of the target."""
    rows: list[Row] = []
    for check in report.passes:
        if check.promise == "exact" and not check.failure:
            continue  # its errors are changes, and there are none
        if not any(error != 0 for error in check.modules.values()):
            continue
        if rows and rows[-1].errors == check.modules:
            rows[-1] = Row(**{**vars(rows[-1]), "alike": (*rows[-1].alike, check.name)})
            continue
        rows.append(Row(check.name, _note(check), check.modules))
    if report.emulation is not None:
        found = report.emulation
        errors: dict[str, float | None] = {}
        for stored in found.modules:
            if stored.overflow:
                errors[stored.module] = None
            elif stored.sqnr_db is not None:
                errors[stored.module] = 10 ** (-stored.sqnr_db / 20)
        note = f"beside the same program in fp32; {found.summary}"
        rows.append(Row(f"in {report.precision} as {found.profile} computes", note, errors))
    return rows


def _note(check: PassCheck) -> str:
    if check.worst_error is None:
        return f"not finite from {check.worst_place} on" if check.failure else "still not finite"
    if not check.worst_error:
        return "equal everywhere"
    return f"worst {check.worst_error:.1e} at {check.worst_place}"


def draw_strip(report: Report, beside: Sequence[Report] = ()) -> Html | None:
    """The figure; None where no pass changed anything.

    Args:
        beside: reports whose figures get the same axis.
    """
    rows = rows_of(report)
    if not rows:
        return None
    floor = _floor(report)
    axis = _axis([report, *beside])
    # The last state of the program is what was judged.
    order = list(reversed(rows))
    drawn = [_row(row, axis, floor) for row in order[:ROWS]]
    folded = None
    if len(order) > SHOWN:
        more, left = len(drawn) - SHOWN, len(order) - len(drawn)
        title = tag("summary", f"{more} earlier {'pass' if more == 1 else 'passes'}")
        rest = tag("p", f"{left} more are in report.json", class_="quiet") if left else None
        folded = tag("details", title, *drawn[SHOWN:], rest)
    lost = any(error is None for row in rows for error in row.errors.values())
    return join(
        (
            _legend(floor, report.floor_dtype, lost=lost, beyond=_has_beyond(rows)),
            *drawn[:SHOWN],
            folded,
        )
    )


def _has_beyond(rows: Sequence[Row]) -> bool:
    return any(e is not None and e >= BEYOND for row in rows for e in row.errors.values())


def _floor(report: Report) -> float | None:
    return max((o.floor for o in report.verdict.outputs if o.floor), default=None)


def _axis(reports: Sequence[Report]) -> Axis:
    rows = [row for report in reports for row in rows_of(report)]
    sizes = [e for row in rows for e in row.errors.values() if e is not None and 0 < e < BEYOND]
    sizes += [floor for report in reports if (floor := _floor(report))]
    if not sizes:
        return Axis(-8, 0)
    low = max(LEAST, math.floor(math.log10(min(sizes))))
    high = min(MOST, math.ceil(math.log10(max(sizes))))
    low, high = min(low, MOST - 3), max(high, LEAST + 3)
    return Axis(min(low, high - 3), high)


def _legend(floor: float | None, dtype: str, *, lost: bool, beyond: bool) -> Html:
    def entry(kind: str, text: str) -> Html:
        return tag("span", tag("i", class_=f"key {kind}"), text, class_="entry")

    ramp = tag(
        "span",
        f"1e{PALE} ",
        *(tag("i", style=f"background:{_color(10.0**power)}") for power in range(PALE, DARK + 1)),
        f" {10**DARK}",
        class_="entry ramp",
    )
    return tag(
        "p",
        ramp,
        entry("equal", "equal: no bar"),
        entry("floor", f"eager {dtype}'s own error at the outputs") if floor else None,
        entry("beyond", "beyond measure: fp64 has zeros") if beyond else None,
        entry("lost", "infinite or NaN") if lost else None,
        class_="legend",
    )


def _row(row: Row, axis: Axis, floor: float | None) -> Html:
    bars = list(_bars(row.errors))
    width = float(len(bars))
    grid = [
        tag("line", x1=0.0, x2=width, y1=100 - y, y2=100 - y, class_="grid")
        for y in (axis.height(10.0**tick) for tick in axis.ticks)
    ]
    if floor:
        y = 100 - axis.height(floor)
        grid.append(tag("line", x1=0.0, x2=width, y1=y, y2=y, class_="floor"))
    drawn = [_bar(index, bar, axis) for index, bar in enumerate(bars)]
    lost = sum(bar.is_lost for bar in bars)
    about = f"{row.name}: {row.note}; {len(bars)} bars, {lost} not finite"
    chart = tag(
        "svg",
        *grid,
        *drawn,
        viewBox=f"0 0 {len(bars)} 100",
        preserveAspectRatio="none",
        role="img",
        aria_label=about,
    )
    ticks = [
        tag("span", f"1e{tick}", style=f"bottom:{axis.height(10.0**tick):.0f}%")
        for tick in axis.ticks
    ]
    alike = f"; unchanged by {', '.join(row.alike)}" if row.alike else ""
    return tag(
        "figure",
        tag("figcaption", tag("b", row.name), f" {row.note}", tag("span", alike)),
        tag("div", tag("div", *ticks, class_="ticks"), chart, class_="plot"),
        tag("div", *_labels(bars), class_="blocks"),
        class_="strip",
    )


@dataclass(frozen=True)
class Bar:
    """One module, or neighbors that share a bar."""

    modules: tuple[str, ...]
    errors: tuple[float | None, ...]

    @property
    def is_lost(self) -> bool:
        return None in self.errors

    @property
    def error(self) -> float:
        return max((e for e in self.errors if e is not None), default=0.0)

    @property
    def title(self) -> str:
        name = self.modules[0] or "the model itself"
        if len(self.modules) > 1:
            name = f"{name} to {self.modules[-1]}, the worst"
        if self.is_lost:
            return f"{name}: infinite or NaN"
        if self.error >= BEYOND:
            return f"{name}: beyond measure, fp64 has zeros"
        return f"{name}: {f'{self.error:.2e}' if self.error else 'equal'}"


def _bars(errors: Errors) -> Iterator[Bar]:
    names = list(errors)
    size = math.ceil(len(names) / BARS) or 1
    for start in range(0, len(names), size):
        part = tuple(names[start : start + size])
        yield Bar(part, tuple(errors[name] for name in part))


def _bar(index: int, bar: Bar, axis: Axis) -> Html | None:
    if not bar.is_lost and not bar.error:  # room to point at
        return tag(
            "rect", tag("title", bar.title), x=index, y=0, width=1, height=100, class_="none"
        )
    is_whole = bar.is_lost or bar.error >= BEYOND
    height = 100.0 if is_whole else axis.height(bar.error)
    kind = "lost" if bar.is_lost else "beyond" if bar.error >= BEYOND else None
    fill = None if kind else _color(bar.error)
    return tag(
        "rect",
        tag("title", bar.title),
        x=index + 0.06,
        y=100 - height,
        width=0.88,
        height=height,
        class_=kind,
        fill=fill,
    )


def _color(error: float) -> str:
    """The color of an error, whatever the axis: from a pale blue to a deep orange."""
    share = (math.log10(error) - PALE) / (DARK - PALE)
    for (start, one), (end, other) in pairwise(_STOPS):
        if share <= end:
            part = max(0.0, (share - start) / (end - start))
            mixed = (round(a + (b - a) * part) for a, b in zip(one, other, strict=True))
            return "#" + "".join(f"{channel:02x}" for channel in mixed)
    return _color(10.0**DARK)


_BLOCK = re.compile(r"^(?P<name>(?:.*?\.)?\d+)(?:\.|\[|$)")


def block_of(module: str) -> str:
    """The repeated block that a module is in: "encoder.block.3"; else its first two names."""
    match = _BLOCK.match(module)
    return match["name"] if match else ".".join(module.split(".")[:2])


def _labels(bars: Sequence[Bar]) -> Iterator[Html]:
    """A label under the longest run of bars of each block: fused ops may stand between others."""
    blocks = [block_of(bar.modules[0]) for bar in bars]
    runs = [(block, len(list(same))) for block, same in groupby(blocks)]
    longest: dict[str, int] = {}
    for index, (block, count) in enumerate(runs):
        if block not in longest or count > runs[longest[block]][1]:
            longest[block] = index
    numbered = [block for block in longest if block.rpartition(".")[2].isdigit()]
    step = math.ceil(len(numbered) / LABELS) or 1
    for index, (block, count) in enumerate(runs):
        parent, _, last = block.rpartition(".")
        text = last or "model"
        if longest[block] != index:
            text = ""
        elif block in numbered:
            text = f"{parent.rpartition('.')[2]} {last}" if block == numbered[0] else last
            text = text if int(last) % step == 0 else ""
        elif count / len(bars) < NARROW:
            text = ""
        kind = "label" if text else None
        yield tag("span", text, style=f"flex:{count}", title=block or "the model", class_=kind)
