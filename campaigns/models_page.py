"""docs/results/models.md from docs/results/models.json: what tests/compiler/test_families.py found.

`make models` runs the tests, which write the results, and then this file, which writes the page.
"""

import json
from collections.abc import Mapping
from typing import Any

from rows import DOCS, table

ROWS = DOCS / "results" / "models.json"
PAGE = DOCS / "results" / "models.md"

HEAD = """\
# Models

`make models` tests one tiny model of each family, and writes this page. Random seeded weights,
norms with outlier channels; CPU: class not recorded.

* **inputs**: derived from `config.json` and `forward`, with the engine's ranges.
* **fused**: fusions in the engine, of those that we expect from the model's structure.
* **fp32**: the verdict, and the engine's error in units of eager fp32's; the limit is 3.
* **other shape**: relative L2 error against eager in a shape that the export did not see.
* **changed**: the verdict of `enginecast verify` after we changed one element of this weight, or
  the epsilon of one norm.
* **fp16**: the verdict in true fp16 arithmetic, or why the model is refused; none of these engines
  has run on a GPU.

"""
COLUMNS = (
    *("family", "class", "inputs", "nodes", "fused", "fp32", "other shape", "changed", "fp16"),
)


def render(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """The page; `rows` by family, each as tests/compiler/test_families.py records it."""
    lines = table(COLUMNS, (_cells(name, row) for name, row in rows.items()))
    return HEAD + "\n".join(lines) + "\n"


def _cells(name: str, row: Mapping[str, Any]) -> list[str]:
    inputs = "; ".join(f"`{key}` [{', '.join(map(str, s))}]" for key, s in row["inputs"].items())
    fused = ", ".join(f"{kind} {got}/{of}" for kind, (got, of) in row["fusions"].items())
    return [
        name,
        f"`{row['class']}`",
        inputs,
        str(row["nodes"]),
        fused or "none",
        f"{row['outcome']}, {row['ratio']:.2g}x",
        f"{row['other shape']:.1e}",
        f"`{row['weight']}`: {row['weight changed']}; epsilon: {row['epsilon changed']}",
        row["fp16"],
    ]


def main() -> None:
    rows = json.loads(ROWS.read_text(encoding="utf-8"))
    PAGE.write_text(render(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
