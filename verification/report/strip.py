"""The error strip: for each pass, the error of every module after it, on one axis.

A bar is a module, in order of execution; its height is the error on a logarithmic axis. What is
equal has no bar, and what is not finite has a color that no error has.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np

from enginecast.verification.metrics import BEYOND
from enginecast.verification.report.data import PassCheck, Report

BARS = 400
"""Most bars of a row; of more modules, neighbors share one."""
SHOWN, ROWS = 4, 12
"""Rows that are shown, and with those that fold open."""
LEAST, MOST = -16, 4
"""Powers of ten that the axis may reach."""
LABELS = 26
"""Most labels of blocks of one kind; of more, every second one or fewer is labeled."""
NARROW = 0.06
"""Part of the width from which on a name fits below its bars."""

PALE, DARK = -8, 0
"""Powers of ten between which the color of an error goes from a pale blue to a deep orange."""
_STOPS = (0.0, 0.45, 0.75, 1.0)
_CHANNELS = ((150, 80, 226, 186), (200, 128, 140, 56), (235, 205, 72, 28))
"""Red, green and blue at each stop."""


@dataclass(frozen=True)
class Bar:
    """One module, or neighbors that share a bar."""

    modules: tuple[str, ...]
    error: float
    """The largest."""
    is_lost: bool
    """Whether one of them is infinite or NaN."""

    @property
    def kind(self) -> str | None:
        """What is no error on the axis: "lost", "beyond" measure, or "none"."""
        if self.is_lost:
            return "lost"
        return "beyond" if self.error >= BEYOND else None if self.error else "none"

    @property
    def title(self) -> str:
        name = self.modules[0] or "the model itself"
        if len(self.modules) > 1:
            name = f"{name} to {self.modules[-1]}, the worst"
        sentences = {
            "lost": "infinite or NaN",
            "beyond": "beyond measure, fp64 has zeros",
            "none": "equal",
        }
        return f"{name}: {sentences[self.kind] if self.kind else f'{self.error:.2e}'}"


@dataclass(frozen=True)
class Label:
    """What stands below some neighboring bars of one block; an empty text: nothing."""

    block: str
    text: str
    count: int


@dataclass(frozen=True)
class Row:
    """The errors of all modules after one pass."""

    name: str
    note: str
    errors: Mapping[str, float | None]
    alike: tuple[str, ...] = ()
    """Passes that left it as it was."""

    @property
    def bars(self) -> list[Bar]:
        names = list(self.errors)
        step = math.ceil(len(names) / BARS) or 1
        parts = [tuple(names[start : start + step]) for start in range(0, len(names), step)]
        return [
            Bar(
                part,
                max((e for name in part if (e := self.errors[name]) is not None), default=0.0),
                any(self.errors[name] is None for name in part),
            )
            for part in parts
        ]

    @property
    def labels(self) -> list[Label]:
        """A label under the longest run of bars of each block: fused ops may stand between."""
        blocks = [block_of(bar.modules[0]) for bar in self.bars]
        runs = [(block, len(list(same))) for block, same in groupby(blocks)]
        longest: dict[str, int] = {}
        for index, (block, count) in enumerate(runs):
            if block not in longest or count > runs[longest[block]][1]:
                longest[block] = index
        numbered = [block for block in longest if block.rpartition(".")[2].isdigit()]
        step = math.ceil(len(numbered) / LABELS) or 1
        found = []
        for index, (block, count) in enumerate(runs):
            parent, _, last = block.rpartition(".")
            text = last or "model"
            if longest[block] != index:
                text = ""
            elif block in numbered:
                text = f"{parent.rpartition('.')[2]} {last}" if block == numbered[0] else last
                text = text if int(last) % step == 0 else ""
            elif count / len(blocks) < NARROW:
                text = ""
            found.append(Label(block, text, count))
        return found


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


@dataclass(frozen=True)
class Strip:
    """The rows of a report, the last state of the program first: that is what was judged."""

    axis: Axis
    floor: float | None
    """Eager's own error at the outputs."""
    dtype: str
    colors: tuple[tuple[int, str], ...]
    """Powers of ten and their colors."""
    has_lost: bool
    has_beyond: bool
    shown: tuple[Row, ...]
    folded: tuple[Row, ...]
    left_out: int


def strip_of(report: Report, beside: Sequence[Report] = ()) -> Strip | None:
    """The strip of a report; None where no pass changed anything.

    Args:
        beside: reports whose strips get the same axis.
    """
    rows = rows_of(report)
    if not rows:
        return None
    errors = [error for row in rows for error in row.errors.values()]
    rows.reverse()
    return Strip(
        axis=_axis([report, *beside]),
        floor=_floor(report),
        dtype=report.floor_dtype,
        colors=tuple((power, color_of(10.0**power)) for power in range(PALE, DARK + 1)),
        has_lost=None in errors,
        has_beyond=any(error is not None and error >= BEYOND for error in errors),
        shown=tuple(rows[:SHOWN]),
        folded=tuple(rows[SHOWN:ROWS]),
        left_out=max(0, len(rows) - ROWS),
    )


def rows_of(report: Report) -> list[Row]:
    """A row for each pass that changed an error, and one for the arithmetic of the target."""
    rows: list[Row] = []
    for check in report.passes:
        if check.promise == "exact" and not check.failure:
            continue  # its errors are changes, and there are none
        if not any(error != 0 for error in check.modules.values()):
            continue
        if rows and rows[-1].errors == check.modules:
            rows[-1] = replace(rows[-1], alike=(*rows[-1].alike, check.name))
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


def color_of(error: float) -> str:
    """The color of an error, whatever the axis."""
    share = (math.log10(error) - PALE) / (DARK - PALE)
    return "#" + "".join(f"{round(float(np.interp(share, _STOPS, c))):02x}" for c in _CHANNELS)


_BLOCK = re.compile(r"^(?P<name>(?:.*?\.)?\d+)(?:\.|\[|$)")


def block_of(module: str) -> str:
    """The repeated block that a module is in: "encoder.block.3"; else its first two names."""
    match = _BLOCK.match(module)
    return match["name"] if match else ".".join(module.split(".")[:2])
