"""The table of what became of the cases, and the file that keeps the rows."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rows import Store

from adversary.cases import GROUPS
from adversary.examine import Row

COLUMNS = ("right", "refused", "rejected", "wrong", "crashed", "timed out")


class Lines(Store):
    """A row on each line, of the cases that there still are, in their order."""

    def read(self, file: Path | None = None) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for row in json.loads((file or self.file).read_text(encoding="utf-8")):
            found.setdefault(row["group"], {})[row["name"]] = row
        return found

    def write(self, found: Mapping[str, Any], file: Path) -> None:
        cases = [case for group in GROUPS for case in group]
        kept = [
            {"group": case.group, "name": case.name, **found[case.group][case.name]}
            for case in cases
            if case.name in found.get(case.group, {})
        ]
        lines = ",\n".join(json.dumps(row) for row in kept)
        file.write_text(f"[\n{lines}\n]\n", encoding="utf-8")


STORE = Lines(Path(__file__).with_name("results.json"), keys=("group", "name"), order=list)


def read() -> dict[tuple[str, str], Row]:
    """The rows there are, by group and name."""
    found = STORE.read()
    return {
        (group, name): Row(**row) for group, rows in found.items() for name, row in rows.items()
    }


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
