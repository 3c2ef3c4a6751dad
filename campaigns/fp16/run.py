"""fp16: every model, and every whole pipeline, in a child of its own."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness import Campaign, Ended

from fp16.examine import COMPONENTS, MODELS, OTHERS, Row, examine
from fp16.page import PAGE, STORE, render
from fp16.pipelines import NAMES, PipelineRow, examine_pipeline

Item = tuple[str, str]
"""A group of rows, and a name in it."""


class Fp16(Campaign[Item, Row | PipelineRow]):
    """A row for each model, and for each pipeline."""

    row, store, page = Row, STORE, PAGE
    seconds = 1800

    def items(self) -> Sequence[Item]:
        models = [("models", name) for name in (*COMPONENTS, *MODELS, *OTHERS)]
        return [*models, *(("pipelines", name) for name in NAMES)]

    def labels(self, item: Item) -> tuple[str, ...]:
        return item

    def blank(self, item: Item) -> Row | PipelineRow:
        group, name = item
        return PipelineRow(name) if group == "pipelines" else Row(name)

    def examine(self, item: Item, folder: Path) -> Row | PipelineRow:
        group, name = item
        return (examine_pipeline if group == "pipelines" else examine)(name, folder)

    def ended(self, row: Row | PipelineRow, child: Ended[Item]) -> None:
        row.seconds = round(child.seconds, 1)
        if child.status:
            row.outcome, row.reason = child.outcome, child.reason

    def said(self, row: Row | PipelineRow) -> str:
        found = row.regions if isinstance(row, Row) else f"{row.plain} {row.found} {row.parts}"
        return f"{row.name}: {row.outcome} {found} ({row.seconds} s) {row.reason[:200]}"

    def render(self, found: Mapping[str, Any]) -> str:
        return render(found)


CAMPAIGN = Fp16()
