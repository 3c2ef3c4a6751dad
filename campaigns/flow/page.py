"""The results, and the tables between the markers of docs/results/control-flow.md."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from flow.examine import Row

RESULTS = Path(__file__).with_name("results.json")
PAGE = Path(__file__).parent.parent.parent / "docs" / "results" / "control-flow.md"
BEGIN, END = "<!-- begin: written by make control-flow -->", "<!-- end -->"
LIBRARIES = ("torch", "transformers", "onnxruntime")
OUTCOMES = ("verified", "refused", "rejected", "crashed", "timed out", "silently wrong")
TITLES = {
    "db": "The examples of torch.export (`torch/_export/db/examples`)",
    "fixtures": "Small modules with every kind of control flow (`tests/support/control_flow.py`)",
    "models": "Models whose code branches, and dense heads",
    "mixtures": "Mixtures of experts",
}


def read() -> dict[str, Any]:
    """The results there are: versions, and rows by group and name."""
    if not RESULTS.exists():
        return {"versions": {}, "rows": {}}
    found: dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8"))
    return found


def merge(rows: Iterable[Row]) -> None:
    """Put rows into the results, in place of older ones of the same names."""
    found = read()
    for row in rows:
        reported = asdict(row)
        found["rows"].setdefault(reported.pop("group"), {})[reported.pop("name")] = reported
    found["versions"] = {name: version(name) for name in LIBRARIES}
    RESULTS.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def write_page() -> None:
    """Rewrite what stands between the markers."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n{tables(read())}{END}{after}", encoding="utf-8")


def tables(found: Mapping[str, Any]) -> str:
    """Every group: how many ended how, and a row for each model."""
    versions = ", ".join(f"{name} {number}" for name, number in found["versions"].items())
    parts = [f"\n{versions}.\n"]
    for group, title in TITLES.items():
        rows = found["rows"].get(group, {})
        ended = Counter(row["outcome"] for row in rows.values())
        counts = ", ".join(f"{ended[outcome]} {outcome}" for outcome in OUTCOMES)
        parts.append(f"\n### {title}\n\n{counts}.\n\n")
        parts.append("| model | outcome | captured by | compared | reason or notes |\n")
        parts.append("|---|---|---|---|---|\n")
        parts += [_line(name, row) for name, row in rows.items()]
    return "".join(parts) + "\n"


def _line(name: str, row: Mapping[str, Any]) -> str:
    reported = row["reason"] or "; ".join(row["notes"])
    cut = reported if len(reported) <= 240 else f"{reported[:237]}..."
    cell = cut.replace("|", "\\|").replace("`", "'")
    return f"| {name} | {row['outcome']} | {row['rung']} | {row['compared']} | {cell} |\n"
