"""The tables of docs/performance.md that `benchmarks/peers.py` gives, written from its JSON."""

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results"
PAGE = ROOT / "docs" / "performance.md"
TABLES = ("peers", "openvino")
"""Names of results; each has its place on the page."""


def shown(name: str) -> tuple[str, str, str]:
    """The line before a table, the table, and the line after it."""
    result = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return f"<!-- {name}: begin -->\n", table(result), f"<!-- {name}: end -->\n"


def table(result: dict[str, Any]) -> str:
    """A row for each case, a column for each that ran any: speed over eager, and cosine."""
    rows = result["rows"]
    names = list(dict.fromkeys(n for row in rows.values() for n in sorted(row["speed"])))
    names.remove("eager")
    lines = [f"| | {' | '.join(names)} |", f"|---{'|---' * len(names)}|"]
    for case, row in rows.items():
        cells = [
            f"{row['speed'][name]:.2f}x ({row['cosine'][name]:.4f})" if name in row["speed"] else ""
            for name in names
        ]
        lines.append(f"| {case} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    page = PAGE.read_text(encoding="utf-8")
    for name in TABLES:
        begin, lines, end = shown(name)
        head, _, rest = page.partition(begin)
        page = "".join((head, begin, lines, end, rest.partition(end)[2]))
    PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
