"""fp16: every model in a child of its own."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness import Campaign, Ended

from fp16.examine import COMPONENTS, MODELS, OTHERS, Row, examine
from fp16.page import PAGE, STORE, render


class Fp16(Campaign[str, Row]):
    """A row for each model."""

    row, store, page = Row, STORE, PAGE
    seconds = 900

    def items(self) -> Sequence[str]:
        return [*COMPONENTS, *MODELS, *OTHERS]

    def examine(self, item: str, folder: Path) -> Row:
        return examine(item, folder)

    def ended(self, row: Row, child: Ended[str]) -> None:
        row.seconds = round(child.seconds, 1)
        if child.status:
            row.outcome, row.reason = child.outcome, child.reason

    def said(self, row: Row) -> str:
        return f"{row.name}: {row.outcome} {row.regions} ({row.seconds} s) {row.reason[:200]}"

    def render(self, found: Mapping[str, Any]) -> str:
        return render(found)


CAMPAIGN = Fp16()
