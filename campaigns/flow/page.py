"""The results, and the tables between the markers of docs/results/control-flow.md."""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rows import DOCS, Store, cell, table, versions

PAGE = DOCS / "results" / "control-flow.md"
BEGIN, END = "<!-- begin: written by make control-flow -->", "<!-- end -->"
OUTCOMES = ("verified", "refused", "rejected", "crashed", "timed out", "silently wrong")
TITLES = {
    "db": "The examples of torch.export (`torch/_export/db/examples`)",
    "fixtures": "Small modules with every kind of control flow (`tests/support/control_flow.py`)",
    "models": "Models whose code branches, and dense heads",
    "mixtures": "Mixtures of experts",
}


STORE = Store(
    Path(__file__).with_name("results.json"),
    under="rows",
    keys=("group", "name"),
    libraries=("torch", "transformers", "onnxruntime"),
    order=list,
)
read = STORE.read


def tables(found: Mapping[str, Any]) -> str:
    """Every group: how many ended how, and a row for each model."""
    lines = ["", versions(found)]
    for group, title in TITLES.items():
        rows = found["rows"].get(group, {})
        ended = Counter(row["outcome"] for row in rows.values())
        counts = ", ".join(f"{ended[outcome]} {outcome}" for outcome in OUTCOMES)
        lines += ["", f"### {title}", "", f"{counts}.", ""]
        heads = ("model", "outcome", "captured by", "compared", "reason or notes")
        lines += table(heads, (_cells(name, row) for name, row in rows.items()))
    return "\n".join(lines) + "\n\n"


def _cells(name: str, row: Mapping[str, Any]) -> tuple[object, ...]:
    reported = cell(row["reason"] or "; ".join(row["notes"]), 240, escape="|`")
    return name, row["outcome"], row["rung"], row["compared"], reported
