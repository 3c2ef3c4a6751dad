"""The command: one process imports the libraries once and forks a child for each operator.

    python campaigns/operators/run.py [--only topk,fft] [--jobs 2]

`--only` takes operators, and names that several begin with ("fft", "nn.functional.conv").  A full
run writes campaigns/operators/results.json and docs/results/operators.md; a partial one updates
their rows.
"""

import argparse
import gc
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
ROOT = Path(__file__).parents[2]
if __name__ == "__main__":
    sys.path[:0] = [str(ROOT / place) for place in ("campaigns", "tests/support", "tests/cache")]

if TYPE_CHECKING:
    from children import Ended

    from operators.examine import Row

TOGETHER = 8
"""Operators that are one module first."""
SLOW = ("Fourier transforms", "Linear algebra", "Special functions")
"""Groups that come last."""
TIME = 240
"""Seconds of processor time that they may take."""
CHILDREN = 2


def run(
    names: Sequence[str],
    workplace: Path,
    *,
    dtypes: Sequence[str] = (),
    jobs: int = CHILDREN,
) -> Iterator["Row"]:
    """Examine operators in processes of their own; give the rows as they come."""
    from children import each

    from operators.examine import examine
    from operators.samples import DTYPES

    _preload(workplace)

    def work(batch: Sequence[str], folder: Path) -> None:
        examine(batch, folder, dtypes or tuple(DTYPES))

    batches = [names[at : at + TOGETHER] for at in range(0, len(names), TOGETHER)]
    alone: list[Sequence[str]] = []
    for ended in each(batches, work, workplace, seconds=TIME, jobs=jobs):
        if ended.status and len(ended.item) > 1:
            alone += [[name] for name in ended.item]
        else:
            yield from _rows(ended)
    for ended in each(alone, work, workplace, seconds=TIME, jobs=jobs):
        yield from _rows(ended)


def _preload(workplace: Path) -> None:
    """Import what every child needs, and load what the first export of a process loads."""
    import torch

    from operators.examine import export
    from operators.samples import calls

    torch.set_num_threads(1)
    export(calls("add", "float32")[:1], workplace / "warm")
    gc.freeze()


def _rows(ended: "Ended[Sequence[str]]") -> Iterator["Row"]:
    from operators.examine import Cell, Row

    if ended.status:
        slow = Cell("timed out", f"more than {TIME} s", 1)
        died = Cell("crashed", ended.death, 1)
        yield Row(ended.item[0], {"float32": slow if ended.late else died})
        return
    for found in json.loads((ended.folder / "rows.json").read_text(encoding="utf-8")):
        found["cells"] = {column: Cell(**cell) for column, cell in found["cells"].items()}
        yield Row(**found)


def main() -> None:
    """The command."""
    from operators.page import group_of, merge, read, write_page
    from operators.samples import names

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="operators, comma-separated")
    parser.add_argument("--dtypes", default="", help="of those in the table, comma-separated")
    parser.add_argument("--missing", action="store_true", help="only those without a row")
    parser.add_argument("--jobs", type=int, default=CHILDREN)
    arguments = parser.parse_args()
    only = tuple(part for part in arguments.only.split(",") if part)
    exact = set(only) & set(names())
    chosen = [
        name
        for name in names()
        if not only
        or name in exact
        or name.startswith(tuple(o for o in only if o not in exact) or ("\0",))
    ]
    dtypes = tuple(part for part in arguments.dtypes.split(",") if part)
    if arguments.missing:
        chosen = [name for name in chosen if name not in read()["operators"]]
    chosen.sort(key=lambda name: (group_of(name) in SLOW, group_of(name)))
    with tempfile.TemporaryDirectory(prefix="operators-") as temporary:
        for row in run(chosen, Path(temporary), dtypes=dtypes, jobs=arguments.jobs):
            said = ", ".join(f"{column} {cell.outcome}" for column, cell in row.cells.items())
            reasons = {c.reason for c in row.cells.values() if c.reason} or {row.reason}
            print(
                f"{row.name}: {said} ({row.seconds} s) {' | '.join(sorted(reasons))[:700]}",
                flush=True,
            )
            merge([row])
    write_page()


if __name__ == "__main__":
    main()
