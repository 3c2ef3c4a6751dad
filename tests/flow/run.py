"""The command: a child process for each model, results as they come.

    python tests/flow/run.py [--only db,IfElse]

`--only` takes groups (db, fixtures, models, mixtures) and names.  The results are kept in
tests/flow/results.json, and the tables of docs/results/control-flow.md are written from them.
"""

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parent.parent)]

from flow.cases import Case, cases
from flow.examine import Row, examine

TIME = 300
"""Seconds that one model may take."""


def run(chosen: Sequence[Case], place: Path) -> Iterator[Row]:
    """Examine each in a process of its own."""
    context = multiprocessing.get_context("fork")
    for number, case in enumerate(chosen):
        folder = place / str(number)
        folder.mkdir()
        child = context.Process(target=_child, args=(case, folder))
        child.start()
        child.join(TIME)
        late = child.is_alive()
        if late:
            child.kill()
            child.join()
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
    row = Row(case.group, case.name)
    row.outcome = "timed out" if late else "crashed"
    row.reason = f"more than {TIME} s" if late else f"the process ended with {code}"
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
