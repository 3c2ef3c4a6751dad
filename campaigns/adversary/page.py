"""The table of what became of the cases, and the file that keeps the rows."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path

from adversary.cases import GROUPS
from adversary.examine import Row

RESULTS = Path(__file__).with_name("results.json")
COLUMNS = ("right", "refused", "rejected", "wrong", "crashed", "timed out")


def read() -> dict[tuple[str, str], Row]:
    """The rows there are, by group and name."""
    if not RESULTS.exists():
        return {}
    rows = [Row(**row) for row in json.loads(RESULTS.read_text(encoding="utf-8"))]
    return {(row.group, row.name): row for row in rows}


def write(rows: Mapping[tuple[str, str], Row]) -> None:
    """Keep the rows of cases that there still are, in the order of the cases."""
    order = [(case.group, case.name) for group in GROUPS for case in group]
    lines = ",\n".join(json.dumps(asdict(rows[key])) for key in order if key in rows)
    RESULTS.write_text(f"[\n{lines}\n]\n", encoding="utf-8")


def table(rows: Iterable[Row]) -> str:
    """By class: what was published and right, turned away, wrong."""
    rows = list(rows)
    heads = (*COLUMNS, "plain right", "unexpected")
    lines = [f"{'class':14}" + "".join(f"{head:>12}" for head in heads)]
    for name in (*(group.name for group in GROUPS), "all"):
        chosen = [row for row in rows if name in ("all", row.group)]
        counts = Counter[str](row.outcome for row in chosen)
        counts["plain right"] = sum(row.is_wrongly_refused for row in chosen)
        counts["unexpected"] = sum(not row.is_as_expected for row in chosen)
        if chosen:
            lines.append(f"{name:14}" + "".join(f"{counts[head]:12}" for head in heads))
    return "\n".join(lines)
