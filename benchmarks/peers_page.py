"""The tables of docs/results/speed.md that `benchmarks/peers.py` gives, written from its JSON."""

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results"
PAGE = ROOT / "docs" / "results" / "speed.md"
TABLES = ("peers", "openvino", "vision")
"""Names of results; each has its place on the page."""


def shown(name: str) -> tuple[str, str, str]:
    """The line before a table, the table, and the line after it."""
    result = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    made = f"{conditions(result)}\n\n{table(result)}"
    return f"<!-- {name}: begin -->\n", made, f"<!-- {name}: end -->\n"


def conditions(result: dict[str, Any]) -> str:
    """What the figures hold for."""
    processors = sorted({row["processor"] for row in result["rows"].values()})
    kind = result["machine"].get("cpu_class") or "class not recorded"
    return f"Random weights; CPU: {', '.join(processors)}, {kind}."


def table(result: dict[str, Any]) -> str:
    """A row for each case, a column for each that ran any: speed over eager, and cosine."""
    rows = result["rows"]
    names = columns(rows)
    lines = [f"| | {' | '.join(names)} |", f"|---{'|---' * len(names)}|"]
    for case, row in rows.items():
        cells = [_cell(row, name) for name in names]
        lines.append(f"| {case} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def columns(rows: dict[str, Any]) -> list[str]:
    """All that ran, ours first, and the bare products last."""
    names = sorted({name for row in rows.values() for name in row["speed"]} - {"eager"})
    order = ("enginecast", "", "products")
    return sorted(names, key=lambda name: next(i for i in (0, 2, 1) if name.startswith(order[i])))


def _cell(row: dict[str, Any], name: str) -> str:
    if name not in row["speed"]:
        return ""
    cosine = f" ({row['cosine'][name]:.4f})" if name in row["cosine"] else ""
    return f"{row['speed'][name]:.2f}x{cosine}"


def main() -> None:
    page = PAGE.read_text(encoding="utf-8")
    for name in TABLES:
        begin, lines, end = shown(name)
        head, _, rest = page.partition(begin)
        page = "".join((head, begin, lines, end, rest.partition(end)[2]))
    PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
