"""The command: a child process for each model, results as they come.

    python campaigns/flow/run.py [--only db,IfElse]

`--only` takes groups (db, fixtures, models, mixtures) and names.  The results are kept in
campaigns/flow/results.json, and the tables of docs/results/control-flow.md are written from them.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
ROOT = Path(__file__).parents[2]
if __name__ == "__main__":
    sys.path[:0] = [str(ROOT / place) for place in ("campaigns", "tests/support", "tests/cache")]

from children import Ended, each

from flow.cases import Case, cases
from flow.examine import Row, examine

TIME = 300
"""Seconds of processor time that one model may take."""


def run(chosen: Sequence[Case], place: Path) -> Iterator[Row]:
    """Examine each in a process of its own."""
    for ended in each(chosen, _examine, place, seconds=TIME, memory=None):
        yield _row(ended)


def _examine(case: Case, folder: Path) -> None:
    row = examine(case, folder)
    (folder / "row.json").write_text(json.dumps(asdict(row)), encoding="utf-8")


def _row(ended: Ended[Case]) -> Row:
    file = ended.folder / "row.json"
    if file.exists():
        return Row(**json.loads(file.read_text(encoding="utf-8")))
    row = Row(ended.item.group, ended.item.name)
    row.outcome = "timed out" if ended.timed_out else "crashed"
    row.reason = f"more than {TIME} s" if ended.timed_out else ended.death
    return row


def main() -> None:
    """The command."""
    from flow.page import merge, write_page

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="groups and names, comma-separated")
    only = {name for name in parser.parse_args().only.split(",") if name}
    chosen = [case for case in cases() if not only or {case.group, case.name} & only]
    with tempfile.TemporaryDirectory(prefix="control-flow-") as temporary:
        for row in run(chosen, Path(temporary)):
            reported = f"{row.reason[:200]} {'; '.join(row.notes)[:200]}"
            print(
                f"{row.group}: {row.name}: {row.outcome} ({row.seconds} s) {reported}", flush=True
            )
            merge([row])
    write_page()


if __name__ == "__main__":
    main()
