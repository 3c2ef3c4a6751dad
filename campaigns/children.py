"""Work that is done in child processes: one process imports the libraries once, and forks a child
for each item, so that neither a crash nor a long run of one is a loss to the others."""

import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

Item = TypeVar("Item")

PATIENCE = 3600
"""Seconds on the clock after which a child that waits for something is ended."""
MEMORY = 12 << 30
"""Bytes of address space that a child may take."""
TICK = 0.05
"""Seconds between two looks at the children."""


@dataclass(frozen=True)
class Ended(Generic[Item]):
    """A child that has ended: its folder holds `log.txt` and whatever the work wrote there."""

    item: Item
    folder: Path
    status: int
    """What `os.wait4` gave: zero where the work was done."""
    seconds: float
    """Seconds of processor time."""
    limit: int
    """Seconds of processor time that it could take."""

    @property
    def late(self) -> bool:
        """Whether it was ended because it took too long."""
        signals = (signal.SIGXCPU, signal.SIGKILL)
        return os.WIFSIGNALED(self.status) and os.WTERMSIG(self.status) in signals

    @property
    def timed_out(self) -> bool:
        """Whether it was late and used the processor all along.  A child that was killed earlier
        ran out of memory, say."""
        # The limit counts whole seconds, and what the child has of its own is a little less.
        return self.late and self.seconds >= 0.9 * self.limit

    @property
    def death(self) -> str:
        """How it ended, in words, with the last line of its log where it ended by itself."""
        if os.WIFSIGNALED(self.status):
            return f"killed by {signal.Signals(os.WTERMSIG(self.status)).name}"
        log = (self.folder / "log.txt").read_text(encoding="utf-8", errors="replace")
        last = "".join(log.strip().splitlines()[-1:])[:200]
        return f"exit code {os.waitstatus_to_exitcode(self.status)}: {last}"


def each(
    items: Sequence[Item],
    work: Callable[[Item, Path], object],
    place: Path,
    *,
    seconds: int,
    jobs: int = 1,
    memory: int | None = MEMORY,
    keep: bool = False,
) -> Iterator[Ended[Item]]:
    """Do `work(item, folder)` in a child for each item, `jobs` at once; give them as they end.

    A folder is below `place`.  It is removed when the next child is asked for, unless `keep`:
    then it has the item's name, if the item is a string.
    """
    waiting = list(reversed(items))
    children: dict[int, tuple[Item, Path, float]] = {}
    while waiting or children:
        while waiting and len(children) < jobs:
            item = waiting.pop()
            folder = _folder(place, item if keep else None)
            pid = _fork(work, item, folder, seconds, memory)
            children[pid] = item, folder, time.monotonic()
        time.sleep(TICK)
        for pid, (item, folder, started) in list(children.items()):
            late = time.monotonic() - started > PATIENCE
            if late:
                os.kill(pid, signal.SIGKILL)
            ended, status, usage = os.wait4(pid, 0 if late else os.WNOHANG)
            if ended:
                del children[pid]
                yield Ended(item, folder, status, usage.ru_utime + usage.ru_stime, seconds)
                if not keep:
                    shutil.rmtree(folder, ignore_errors=True)


def _folder(place: Path, name: object) -> Path:
    place.mkdir(parents=True, exist_ok=True)
    if not isinstance(name, str):
        return Path(tempfile.mkdtemp(dir=place))
    folder = place / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return folder


def _fork(
    work: Callable[[Item, Path], object],
    item: Item,
    folder: Path,
    seconds: int,
    memory: int | None,
) -> int:
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
        # What ran this process may have put files of its own in their places, as pytest does.
        sys.stdout = sys.stderr = os.fdopen(log, "w", buffering=1)
        if memory is not None:
            resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 5))
        signal.signal(signal.SIGXCPU, signal.SIG_DFL)
        work(item, folder)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
