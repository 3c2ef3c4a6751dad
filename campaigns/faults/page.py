"""The table of docs/how-it-works/reliability.md, from campaigns/faults/results.json."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rows import DOCS, Store
from rows import table as lines

from faults.campaigns import CAMPAIGNS

STORE = Store(
    Path(__file__).with_name("results.json"),
    order=lambda rows: [campaign.name for campaign in CAMPAIGNS],
)
PAGE = DOCS / "how-it-works" / "reliability.md"
BEGIN = "<!-- made by `make faults`: begin -->\n"
END = "<!-- end -->\n"


def table(rows: Mapping[str, Any]) -> str:
    """A row for each campaign."""
    heads = ("faults", "injected", "fired", "what came of them", "harm")
    return "\n".join(lines(heads, (_cells(name, row) for name, row in rows.items()))) + "\n"


def _cells(name: str, row: Mapping[str, Any]) -> tuple[object, ...]:
    outcomes = ", ".join(f"{count:,} {outcome}" for outcome, count in row["outcomes"].items())
    counts = (f"{row['injected']:,}", f"{row['fired']:,}", outcomes, len(row["defects"]))
    return f"{name}: {row['promise']}", *counts
