"""Control flow: groups of models (db, fixtures, models, mixtures), a child for each model."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness import Campaign

from flow.cases import Case, cases
from flow.examine import Row, examine
from flow.page import BEGIN, END, PAGE, STORE, tables


class Flow(Campaign[Case, Row]):
    """A row for each model."""

    row, store, page, markers = Row, STORE, PAGE, (BEGIN, END)
    seconds = 300

    def items(self) -> Sequence[Case]:
        return list(cases())

    def labels(self, item: Case) -> tuple[str, ...]:
        return item.group, item.name

    def examine(self, item: Case, folder: Path) -> Row:
        return examine(item, folder)

    def said(self, row: Row) -> str:
        reported = f"{row.reason[:200]} {'; '.join(row.notes)[:200]}"
        return f"{row.group}: {row.name}: {row.outcome} ({row.seconds} s) {reported}"

    def render(self, found: Mapping[str, Any]) -> str:
        return f"\n{tables(found)}"


CAMPAIGN = Flow()
