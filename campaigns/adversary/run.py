"""The adversary: modules that try to mislead, a child for each; the classes are groups."""

from collections.abc import Sequence
from pathlib import Path

from harness import Campaign, Ended, commit

from adversary.case import Case
from adversary.cases import GROUPS, WARM
from adversary.examine import Row, examine
from adversary.page import STORE, read, table

SOURCES = ("capture", "passes", "exporters", "verification", "runtime", "enginecast")


class Adversary(Campaign[Case, Row]):
    """A row for each module."""

    row, store = Row, STORE
    seconds = 240

    def items(self) -> Sequence[Case]:
        return [case for group in GROUPS for case in group]

    def labels(self, item: Case) -> tuple[str, ...]:
        return item.group, item.name

    def prepare(self, folder: Path) -> None:
        examine(WARM, folder)  # what the first export of a process makes, forks share

    def examine(self, item: Case, folder: Path) -> Row:
        return examine(item, folder)

    def blank(self, item: Case) -> Row:
        return Row(item.group, item.name, item.expected)

    def ended(self, row: Row, child: Ended[Case]) -> None:
        super().ended(row, child)
        row.commit = commit(*SOURCES)

    def said(self, row: Row) -> str:
        plain = f"(plain {row.plain})" if row.plain else ""
        expected = "" if row.is_as_expected else f", expected {row.expected}"
        return f"{row.group}: {row.name}: {row.outcome}{expected}: {row.reason} {plain}"

    def finish(self, rows: Sequence[Row]) -> int:
        groups = {row.group for row in rows}
        print(table(row for row in read().values() if row.group in groups))
        return 0


CAMPAIGN = Adversary()
