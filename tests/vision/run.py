"""Export every model of `vision.models`, each in a process of its own, and write the table.

    python tests/vision/run.py [--only resnet18,nms] [--jobs 2] [--keep DIR]

Models of packages that are not installed are left out; their rows stay as they are.
"""

import argparse
import os
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

os.environ.setdefault("OMP_NUM_THREADS", "1")
if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parent.parent)]

import msgspec

if TYPE_CHECKING:
    from vision.examine import Row

TIME = 240
"""Seconds of processor time that one model may take."""
PATIENCE = 3600
"""Seconds on the clock after which a child is ended."""


def run(names: Sequence[str], place: Path, jobs: int) -> Iterator["Row"]:
    """Examine each; give the rows as they come."""
    from vision.examine import prepare

    prepare()
    waiting, children = list(reversed(names)), dict[int, tuple[str, float]]()
    while waiting or children:
        while waiting and len(children) < jobs:
            name = waiting.pop()
            (place / name).mkdir(parents=True, exist_ok=True)
            children[_fork(name, place / name)] = name, time.monotonic()
        time.sleep(0.05)
        for pid, (name, started) in list(children.items()):
            late = time.monotonic() - started > PATIENCE
            if late:
                os.kill(pid, signal.SIGKILL)
            ended, status, usage = os.wait4(pid, 0 if late else os.WNOHANG)
            if ended:
                del children[pid]
                yield _row(place / name, name, status, usage.ru_utime + usage.ru_stime)


def _fork(name: str, folder: Path) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        log = os.open(folder / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        resource.setrlimit(resource.RLIMIT_CPU, (TIME, TIME + 5))
        signal.signal(signal.SIGXCPU, signal.SIG_DFL)
        from vision.examine import examine

        examine(name, folder)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _row(folder: Path, name: str, status: int, seconds: float) -> "Row":
    from vision.examine import Row

    try:
        row = msgspec.json.decode((folder / "row.json").read_bytes(), type=Row)
    except FileNotFoundError:
        row = Row(name)
    row.seconds = round(seconds, 1)
    if status:
        late = os.WIFSIGNALED(status) and seconds > 0.9 * TIME
        row.reason = f"more than {TIME} s" if late else f"the process ended: {status}"
        if row.fp32 == "verified":  # what follows did not end
            row.fp16 = row.reason
        else:
            row.fp32 = "timed out" if late else "crashed"
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
        for row in run(names, arguments.keep or Path(temporary), arguments.jobs):
            print(
                f"{row.name}: {row.fp32} {row.sizes} mutation {row.mutation} fp16 {row.fp16}"
                f" ({row.seconds} s) {row.reason[:200]}",
                flush=True,
            )
            merge([row])
    write_page()


if __name__ == "__main__":
    main()
