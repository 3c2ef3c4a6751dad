"""The table of docs/performance.md that `benchmarks/peers.py` gives, written from its JSON."""

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULT = Path(__file__).parent / "results" / "peers.json"
PAGE = ROOT / "docs" / "performance.md"
BEGIN, END = "<!-- peers: begin -->\n", "<!-- peers: end -->\n"


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
    head, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    tail = rest.partition(END)[2]
    shown = table(json.loads(RESULT.read_text(encoding="utf-8")))
    PAGE.write_text(f"{head}{BEGIN}{shown}{END}{tail}", encoding="utf-8")


if __name__ == "__main__":
    main()
