"""Export every model of `vision.models`, each in a process of its own, and write the table.

    python campaigns/vision/run.py [--only resnet18,nms] [--jobs 2] [--keep DIR]

Models of packages that are not installed are left out; their rows stay as they are.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).parents[2]
if __name__ == "__main__":
    sys.path[:0] = [str(ROOT / place) for place in ("campaigns", "tests/support", "tests/cache")]

import msgspec

if TYPE_CHECKING:
    from children import Ended

    from vision.examine import Row

TIME = 240
"""Seconds of processor time that one model may take."""


def run(names: Sequence[str], place: Path, jobs: int, *, keep: bool = False) -> Iterator["Row"]:
    """Examine each in a process of its own; give the rows as they come."""
    from children import each

    from vision.examine import examine, prepare

    prepare()
    for ended in each(names, examine, place, seconds=TIME, jobs=jobs, memory=None, keep=keep):
        yield _row(ended)


def _row(ended: "Ended[str]") -> "Row":
    from vision.examine import Row

    try:
        row = msgspec.json.decode((ended.folder / "row.json").read_bytes(), type=Row)
    except FileNotFoundError:
        row = Row(ended.item)
    row.seconds = round(ended.seconds, 1)
    if ended.status:
        row.reason = f"more than {TIME} s" if ended.timed_out else ended.death
        if row.fp32 == "verified":  # what follows did not end
            row.fp16 = row.reason
        else:
            row.fp32 = "timed out" if ended.timed_out else "crashed"
    return row


def main() -> None:
    """The command."""
    from vision.models import ENTRIES
    from vision.page import main as write_page
    from vision.page import merge

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="names, comma-separated")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--keep", type=Path, help="folder for bundles and logs")
    arguments = parser.parse_args()
    names = arguments.only.split(",") if arguments.only else list(ENTRIES)
    missing = {ENTRIES[name].package for name in names if not find_spec(ENTRIES[name].package)}
    for package in sorted(missing):
        print(f"{package} is not installed: its models are left out", flush=True)
    names = [name for name in names if ENTRIES[name].package not in missing]
    with tempfile.TemporaryDirectory(prefix="vision-") as temporary:
        place, keep = arguments.keep or Path(temporary), arguments.keep is not None
        for row in run(names, place, arguments.jobs, keep=keep):
            print(
                f"{row.name}: {row.fp32} {row.sizes} mutation {row.mutation} fp16 {row.fp16}"
                f" ({row.seconds} s) {row.reason[:200]}",
                flush=True,
            )
            merge([row])
    write_page()


if __name__ == "__main__":
    main()
