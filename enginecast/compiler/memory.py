"""What a step takes of this machine's memory, and what the machine has."""

import ctypes
import gc
import os
import resource
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

INTERVAL = 0.01
"""Seconds between two looks: a layer of a large model takes longer."""

FEWER = 10_000
"""Objects made between two looks for garbage in cycles.  Tracing makes millions that stay, and
CPython's 700 costs 6 to 9 % of an export; 50,000 costs more again."""

STATM = Path("/proc/self/statm")
CGROUPS = (
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (
        Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
        Path("/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ),
)


@dataclass
class Peak:
    """The most that was seen at once, in bytes; 0 where there is no /proc."""

    anonymous: int = 0
    """What no file backs: it must fit into memory.  Mapped weights can be read again and count
    only in `peak_resident`."""

    _looking: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def look(self) -> None:
        # The watcher and the step look at the same time.  Without the lock, the one that read less
        # may write last.
        with self._looking:
            self.anonymous = max(self.anonymous, anonymous())


@contextmanager
def watched() -> Iterator[Peak]:
    """Watch the memory of this process while the block runs."""
    peak, done = Peak(), threading.Event()

    def watch() -> None:
        while not done.wait(INTERVAL):
            peak.look()

    watcher = threading.Thread(target=watch, daemon=True)
    peak.look()
    watcher.start()
    try:
        yield peak
    finally:
        done.set()
        watcher.join()
        peak.look()


@dataclass
class _Collections:
    """Who wants fewer collections now: exports in several threads share one threshold."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    users: int = 0
    before: tuple[int, int, int] = (0, 0, 0)


_collections = _Collections()


@contextmanager
def fewer_collections() -> Iterator[None]:
    """Let CPython look for garbage in cycles less often while the block runs.

    A threshold that is higher already, or 0 (no collections), stays.
    """
    with _collections.lock:
        if not _collections.users:
            _collections.before = gc.get_threshold()
            first, *others = _collections.before
            if 0 < first < FEWER:
                gc.set_threshold(FEWER, *others)
        _collections.users += 1
    try:
        yield
    finally:
        with _collections.lock:
            _collections.users -= 1
            if not _collections.users:
                gc.set_threshold(*_collections.before)


def trim() -> None:
    """Give the system back what was freed: glibc keeps blocks below 32 MB, which the weights of a
    large model leave gigabytes of.  Other C libraries have no such call.
    """
    give_back = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if give_back is not None:
        give_back(0)


def anonymous() -> int:
    """Bytes of this process that no file backs; 0 where there is no /proc."""
    if not STATM.exists():
        return 0
    _, resident, shared, *_ = map(int, STATM.read_text().split())
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE")


def peak_resident() -> int:
    """Most bytes that this process ever had in memory, mapped files included: what
    `/usr/bin/time -v` calls the maximum resident set size."""
    found = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return found if sys.platform == "darwin" else found * 1024


def available() -> int | None:
    """Bytes that may still be taken without swapping; None where there is no /proc.

    A container may have less than its host (Linux cgroups, both versions).
    """
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():
        return None
    fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    found = int(fields["MemAvailable"].split()[0]) * 1024
    for limit, used in CGROUPS:
        if limit.exists() and (text := limit.read_text().strip()).isdigit():
            found = min(found, int(text) - int(used.read_text()))
    return found
