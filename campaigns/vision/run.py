"""Vision: every model of `vision.models`, in a child of its own.

Models of packages that are not installed are left out; their rows stay as they are.
"""

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from harness import Campaign, Ended

from vision.examine import Row, examine, prepare
from vision.models import ENTRIES
from vision.page import PAGE, STORE, render


class Vision(Campaign[str, Row]):
    """A row for each model."""

    row, store, page = Row, STORE, PAGE
    seconds = 240

    def items(self) -> Sequence[str]:
        return list(ENTRIES)

    def lacks(self, item: str) -> str:
        package = ENTRIES[item].package
        return "" if find_spec(package) else f"{package} is not installed"

    def prepare(self, folder: Path) -> None:
        prepare()

    def examine(self, item: str, folder: Path) -> Row:
        return examine(item, folder)

    def ended(self, row: Row, child: Ended[str]) -> None:
        row.seconds = round(child.seconds, 1)
        if child.status:
            row.reason = child.reason
            if row.fp32 == "verified":  # what follows did not end
                row.fp16 = child.reason
            else:
                row.fp32 = child.outcome

    def said(self, row: Row) -> str:
        return (
            f"{row.name}: {row.fp32} {row.sizes} mutation {row.mutation} fp16 {row.fp16}"
            f" ({row.seconds} s) {row.reason[:200]}"
        )

    def render(self, found: Mapping[str, Any]) -> str:
        return render(found)


CAMPAIGN = Vision()
