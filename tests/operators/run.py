"""The command: one process imports the libraries once and forks a child for each operator.

    python tests/operators/run.py [--only topk,fft] [--jobs 2]

`--only` takes operators, and names that several begin with ("fft", "nn.functional.conv").  A full
run writes tests/operators/results.json and docs/results/operators.md; a partial one updates their
rows.
"""

import argparse
import gc
import itertools
import json
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parent.parent)]

if TYPE_CHECKING:
    from operators.examine import Row

TOGETHER = 8
"""Operators that are one module first."""
SLOW = ("Fourier transforms", "Linear algebra", "Special functions")
"""Groups that come last."""
TIME = 240
"""Seconds of processor time that they may take."""
PATIENCE = 900
"""Seconds on the clock after which a child that waits for something is ended."""
MEMORY = 12 << 30
"""Bytes of address space that one operator may take."""
CHILDREN = 2


@dataclass
class _Child:
    names: Sequence[str]
    folder: Path
    started: float


def run(
    names: Sequence[str],
    workplace: Path,
    *,
    dtypes: Sequence[str] = (),
    jobs: int = CHILDREN,
) -> Iterator["Row"]:
    """Examine operators in processes of their own; give the rows as they come."""
    _preload(workplace)
    waiting = [names[at : at + TOGETHER] for at in range(0, len(names), TOGETHER)][::-1]
    children: dict[int, _Child] = {}
    for number in itertools.count():
        while waiting and len(children) < jobs:
            batch = waiting.pop()
            folder = Path(tempfile.mkdtemp(prefix=f"{number}-", dir=workplace))
            children[_fork(batch, folder, dtypes)] = _Child(batch, folder, time.monotonic())
        if not children:
            return
        time.sleep(0.02)
        for pid, child in list(children.items()):
            late = time.monotonic() - child.started > PATIENCE
            if late:
                os.kill(pid, signal.SIGKILL)
            ended, status, _ = os.wait4(pid, 0 if late else os.WNOHANG)
            if not ended:
                continue
            del children[pid]
            if status and len(child.names) > 1:
                waiting += [[name] for name in child.names]
            else:
                yield from _rows(child, status)
            shutil.rmtree(child.folder, ignore_errors=True)


def _preload(workplace: Path) -> None:
    """Import what every child needs, and load what the first export of a process loads."""
    import torch

    from operators.examine import export
    from operators.samples import calls

    torch.set_num_threads(1)
    export(calls("add", "float32")[:1], workplace / "warm")
    gc.freeze()


def _fork(names: Sequence[str], folder: Path, dtypes: Sequence[str]) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        log = os.open(folder / "log.txt", os.O_WRONLY | os.O_CREAT)
        os.dup2(log, 1)
        os.dup2(log, 2)
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        resource.setrlimit(resource.RLIMIT_CPU, (TIME, TIME + 5))
        signal.signal(signal.SIGXCPU, signal.SIG_DFL)
        from operators.examine import examine
        from operators.samples import DTYPES

        examine(names, folder, dtypes or tuple(DTYPES))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _rows(child: _Child, status: int) -> Iterator["Row"]:
    from operators.examine import Cell, Row

    if status:
        late = os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGXCPU, signal.SIGKILL)
        died = Cell("crashed", _death(status, child.folder), 1)
        slow = Cell("timed out", f"more than {TIME} s", 1)
        yield Row(child.names[0], {"float32": slow if late else died})
        return
    for found in json.loads((child.folder / "rows.json").read_text(encoding="utf-8")):
        found["cells"] = {column: Cell(**cell) for column, cell in found["cells"].items()}
        yield Row(**found)


def _death(status: int, folder: Path) -> str:
    if os.WIFSIGNALED(status):
        return f"killed by {signal.Signals(os.WTERMSIG(status)).name}"
    log = (folder / "log.txt").read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return f"exit code {os.waitstatus_to_exitcode(status)}: {''.join(log[-1:])[:200]}"


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
