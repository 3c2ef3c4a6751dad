"""How much memory a step uses, and how much this machine has."""

import ctypes
import gc
import os
import resource
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

INTERVAL = 0.01
"""Seconds between two looks: a layer of a large model takes longer."""

FEWER = 10_000
"""Objects made between two looks for garbage in cycles.  Tracing makes millions that stay, and
CPython's 700 costs 6 to 9 % of an export; 50,000 costs more again."""

FEW = 500_000_000
"""Elements of weights up to which freed memory is kept."""
KEPT = 1 << 30
"""Bytes at the end of the heap that are kept."""
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_MMAP_MAX = -1, -3, -4
"""Options of glibc's mallopt(3)."""
TUNED = ("MALLOC_", "GLIBC_TUNABLES")
"""Environment variables by which a user sets the same options, which then stay."""

STATM = Path("/proc/self/statm")


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
class _Setting:
    """One setting of the process that exports in several threads share."""

    set: Callable[[], Callable[[], None]]
    """Changes it, and gives what restores it."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    users: int = 0
    restore: Callable[[], None] = lambda: None

    @contextmanager
    def used(self) -> Iterator[None]:
        """Set it while a block runs; the last of several blocks restores it."""
        with self.lock:
            if not self.users:
                self.restore = self.set()
            self.users += 1
        try:
            yield
        finally:
            with self.lock:
                self.users -= 1
                if not self.users:
                    self.restore()


def _collect_less() -> Callable[[], None]:
    before = gc.get_threshold()
    first, *others = before
    if 0 < first < FEWER:
        gc.set_threshold(FEWER, *others)
    return partial(gc.set_threshold, *before)


def _keep_freed() -> Callable[[], None]:
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is None or any(name.startswith(TUNED) for name in os.environ):
        return lambda: None
    set_option(M_MMAP_MAX, 0)
    set_option(M_TRIM_THRESHOLD, KEPT)

    def restore() -> None:
        # What glibc comes to by itself once large blocks were freed; it stops adjusting the
        # thresholds for good when one is set.
        set_option(M_MMAP_THRESHOLD, 32 << 20)
        set_option(M_TRIM_THRESHOLD, 64 << 20)
        set_option(M_MMAP_MAX, 65536)
        trim()

    return restore


_fewer, _kept = _Setting(_collect_less), _Setting(_keep_freed)


def fewer_collections() -> AbstractContextManager[None]:
    """Let CPython look for garbage in cycles less often while a block runs.

    A threshold that is higher already, or 0 (no collections), stays.
    """
    return _fewer.used()


def keeping_freed(elements: int) -> AbstractContextManager[None]:
    """Let the C library keep what is freed, for the next allocation, while a block runs.

    glibc takes each block above 32 MB from the system and gives it back, and the system clears its
    pages each time.  That was 29 % of the CPU time of a Segformer's export at 512x512, whose peak
    did not change.  With large weights, memory is what counts: then nothing is set.  Nor is it with
    other C libraries, or where the user has set glibc's.

    Args:
        elements: of the model's weights.
    """
    return _kept.used() if elements <= FEW else nullcontext()


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
