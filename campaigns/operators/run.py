"""Operators: each of torch's database, several in a child as long as none of them kills it."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from harness import Campaign, Ended, each, keep_rows, kept_rows

from operators.examine import Cell, Row, examine, export
from operators.page import PAGE, STORE, group_of, page
from operators.samples import calls, names

TOGETHER = 8
"""Operators that are one module first."""
SLOW = ("Fourier transforms", "Linear algebra", "Special functions")
"""Groups that come last."""


class Operators(Campaign[str, Row]):
    """A row for each operator."""

    row, store, page = Row, STORE, PAGE
    seconds = 240
    memory = 12 << 30

    def items(self) -> Sequence[str]:
        return sorted(names(), key=lambda name: (group_of(name) in SLOW, group_of(name)))

    def prepare(self, folder: Path) -> None:
        """Load what the first export of a process loads."""
        torch.set_num_threads(1)
        export(calls("add", "float32")[:1], folder / "warm")

    def rows(self, items: Sequence[str], place: Path, jobs: int, keep: bool) -> Iterator[Row]:
        def work(batch: Sequence[str], folder: Path) -> None:
            keep_rows(examine(batch, folder), folder)

        batches = [items[at : at + TOGETHER] for at in range(0, len(items), TOGETHER)]
        alone: list[str] = []
        for child in each(batches, work, place, seconds=self.seconds, jobs=jobs):
            if child.status:
                alone += child.item
            else:
                yield from kept_rows(child.folder, Row)
        yield from super().rows(alone, place, jobs, keep)

    def examine(self, item: str, folder: Path) -> Row:
        (row,) = examine([item], folder)
        return row

    def ended(self, row: Row, child: Ended[str]) -> None:
        if child.status:
            row.cells = {"float32": Cell(child.outcome, child.reason, 1)}

    def said(self, row: Row) -> str:
        said = ", ".join(f"{column} {cell.outcome}" for column, cell in row.cells.items())
        reasons = {cell.reason for cell in row.cells.values() if cell.reason} or {row.reason}
        return f"{row.name}: {said} ({row.seconds} s) {' | '.join(sorted(reasons))[:700]}"

    def render(self, found: Mapping[str, Any]) -> str:
        return page(found)


CAMPAIGN = Operators()
