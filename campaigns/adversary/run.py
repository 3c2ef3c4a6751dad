"""The command: two processes at a time, a process for each case, results as they come.

    python campaigns/adversary/run.py [--only writes,edges] [--match REGEX] [--again]

`--only` takes classes, `--match` names of cases.  The rows are kept in campaigns/adversary/results.json; a case that was
run at the commit at hand is not run again, unless `--again` asks for it.
"""

import argparse
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from multiprocessing.context import ForkProcess
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
ROOT = Path(__file__).parents[2]
if __name__ == "__main__":
    sys.path[:0] = [str(ROOT / place) for place in ("campaigns", "tests/support", "tests/cache")]

from adversary.case import Case
from adversary.cases import GROUPS, WARM
from adversary.examine import Row, examine
from adversary.page import read, table, write

TIME = 240
"""Seconds that one case may take."""
AT_ONCE = 2


def run(chosen: Sequence[Case], place: Path, at_once: int = AT_ONCE) -> Iterator[Row]:
    """Examine each in a process of its own, forked from this one, in which all is imported."""
    context = multiprocessing.get_context("fork")
    waiting = list(enumerate(chosen))[::-1]
    running: list[tuple[Case, Path, ForkProcess, float]] = []
    while waiting or running:
        while waiting and len(running) < at_once:
            number, case = waiting.pop()
            folder = place / str(number)
            folder.mkdir()
            child = context.Process(target=_child, args=(case, folder))
            child.start()
            running.append((case, folder, child, time.monotonic()))
        time.sleep(0.02)
        for entry in list(running):
            case, folder, child, started = entry
            late = time.monotonic() - started > TIME
            if child.is_alive() and not late:
                continue
            child.kill()
            child.join()
            running.remove(entry)
            yield _row(case, folder / "row.json", late, child.exitcode)


def _child(case: Case, folder: Path) -> None:
    log = os.open(folder / "log.txt", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    row = examine(case, folder)
    (folder / "row.json").write_text(json.dumps(asdict(row)), encoding="utf-8")


def _row(case: Case, file: Path, late: bool, code: int | None) -> Row:
    if file.exists():
        return Row(**json.loads(file.read_text(encoding="utf-8")))
    reason = f"more than {TIME} s" if late else f"the process ended with {code}"
    row = Row(case.group, case.name, case.expected, reason=reason)
    row.outcome = "timed out" if late else "crashed"
    return row


def commit() -> str:
    """The last commit that changed a source of the package."""
    sources = ["capture", "passes", "exporters", "verification", "runtime", "enginecast"]
    command = ["git", "log", "-1", "--format=%h", "--", *sources]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT).stdout.strip()


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="classes, comma-separated")
    parser.add_argument("--match", default="", help="what is found in the names of the cases")
    parser.add_argument("--again", action="store_true", help="run what this commit has run, too")
    options = parser.parse_args()
    only = {name for name in options.only.split(",") if name}
    rows, here = read(), commit()
    chosen = [
        case
        for group in GROUPS
        for case in group
        if (not only or case.group in only)
        and re.search(options.match, case.name)
        and (options.again or not _is_done(rows, case, here))
    ]
    with tempfile.TemporaryDirectory(prefix="adversary-") as temporary:
        place = Path(temporary)
        (place / "warm").mkdir()
        examine(WARM, place / "warm")  # what the first export of a process makes, forks share
        for row in run(chosen, place):
            row.commit = here
            rows[row.group, row.name] = row
            write(rows)
            if not row.is_as_expected or row.is_wrongly_refused:
                print(
                    f"{row.group}: {row.name}: {row.outcome}, expected {row.expected}: "
                    f"{row.reason} {f'(plain {row.plain})' if row.plain else ''}",
                    flush=True,
                )
    print(table(row for row in rows.values() if not only or row.group in only))


def _is_done(rows: dict[tuple[str, str], Row], case: Case, here: str) -> bool:
    row = rows.get((case.group, case.name))
    return row is not None and row.commit == here and row.expected == case.expected


if __name__ == "__main__":
    main()
