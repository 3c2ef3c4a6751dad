"""diffusion: every tiny pipeline, in a child of its own."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness import Campaign
from tiny_pipelines import PIPELINES

from diffusion.examine import Row, examine
from diffusion.page import BEGIN, END, PAGE, STORE, render


class Diffusion(Campaign[str, Row]):
    """A row for each pipeline."""

    row, store, page, markers = Row, STORE, PAGE, (BEGIN, END)
    seconds = 1800

    def items(self) -> Sequence[str]:
        return list(PIPELINES)

    def examine(self, item: str, folder: Path) -> Row:
        return examine(item, folder)

    def ended(self, row: Row, child: Any) -> None:
        super().ended(row, child)
        row.seconds = round(child.seconds, 1)

    def said(self, row: Row) -> str:
        eager = f", eager: {', '.join(row.eager)}" if row.eager else ""
        return (
            f"{row.name}: {row.outcome}, {row.engines} engines{eager}, worst {row.worst},"
            f" runs: {row.runs} ({row.seconds} s) {row.reason[:200]}"
        )

    def render(self, found: Mapping[str, Any]) -> str:
        return render(found)


CAMPAIGN = Diffusion()
