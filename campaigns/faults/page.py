"""The table of docs/how-it-works/reliability.md, from campaigns/faults/results.json."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).with_name("results.json")
PAGE = Path(__file__).parents[2] / "docs" / "how-it-works" / "reliability.md"
BEGIN = "<!-- made by `make faults`: begin -->\n"
END = "<!-- end -->\n"


def read() -> dict[str, Any]:
    return json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}


def table(rows: Mapping[str, Any]) -> str:
    lines = ["| faults | injected | fired | what came of them | harm |", "|---|---|---|---|---|"]
    for name, row in rows.items():
        outcomes = ", ".join(f"{count:,} {outcome}" for outcome, count in row["outcomes"].items())
        lines.append(
            f"| {name}: {row['promise']} | {row['injected']:,} | {row['fired']:,} | {outcomes} |"
            f" {len(row['defects'])} |"
        )
    return "\n".join(lines) + "\n"


def write(rows: Mapping[str, Any]) -> None:
    """Keep the rows, and put their table into the page."""
    RESULTS.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    PAGE.write_text(f"{before}{BEGIN}{table(rows)}{END}{after}", encoding="utf-8")
