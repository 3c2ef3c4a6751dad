"""How much memory a step uses, and how much this machine has."""

import ctypes
import gc
import os
import resource
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

INTERVAL = 0.01
"""Seconds between two samples: a layer of a large model takes longer."""

FEWER = 10_000
"""Allocations between two runs of the cyclic garbage collector. Tracing makes millions of objects
that stay, and CPython's default of 700 costs 6 to 9 % of an export; 50,000 costs more again."""

FEW = 500_000_000
"""Number of weight elements up to which freed memory is kept."""
KEPT = 1 << 30
"""Free bytes that are kept at the end of the heap."""
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_MMAP_MAX = -1, -3, -4
"""Options of glibc's mallopt(3)."""
TUNED = ("MALLOC_", "GLIBC_TUNABLES")
"""Environment variables that set the same options; where a user set one, nothing is changed."""

STATM = Path("/proc/self/statm")


@dataclass
class Peak:
    """Peak memory in bytes; 0 without /proc."""

    anonymous: int = 0
    """Memory that no file backs, which must fit. Mapped weights can be read again and count only in
    `peak_resident`."""

    def look(self) -> None:
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


@contextmanager
def fewer_collections() -> Iterator[None]:
    """Run CPython's cyclic garbage collector less often while a block runs.

    A threshold that is higher already, or 0 (no collections), stays.
    """
    before = gc.get_threshold()
    if not 0 < before[0] < FEWER:
        yield
        return
    gc.set_threshold(FEWER, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


@contextmanager
def keeping_freed(elements: int) -> Iterator[None]:
    """Let the C library keep freed memory for the next allocation while a block runs.

    glibc takes each block above 32 MB from the system and gives it back, and the system clears its
    pages each time.  That was 29 % of the CPU time of a Segformer's export at 512x512, whose peak
    did not change.  With large weights, memory is what counts: then nothing is set.  Nor is it with
    other C libraries, or where the user has set glibc's.

    Args:
        elements: number of elements of the model's weights.
    """
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    is_set = any(name.startswith(TUNED) for name in os.environ)
    if elements > FEW or set_option is None or is_set:
        yield
        return
    set_option(M_MMAP_MAX, 0)
    set_option(M_TRIM_THRESHOLD, KEPT)
    try:
        yield
    finally:
        # What glibc comes to by itself once large blocks were freed; it stops adjusting the
        # thresholds for good when one is set.
        set_option(M_MMAP_THRESHOLD, 32 << 20)
        set_option(M_TRIM_THRESHOLD, 64 << 20)
        set_option(M_MMAP_MAX, 65536)
        trim()


def trim() -> None:
    """Return freed memory to the system.

    glibc keeps freed blocks below 32 MB, and a large model's weights can leave gigabytes of them.
    Other C libraries have no such call.
    """
    give_back = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if give_back is not None:
        give_back(0)


def anonymous() -> int:
    """Bytes of this process that no file backs; 0 without /proc."""
    if not STATM.exists():
        return 0
    _, resident, shared, *_ = map(int, STATM.read_text().split())
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE")


def peak_resident() -> int:
    """Peak resident set size of this process in bytes, mapped files included."""
    found = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return found if sys.platform == "darwin" else found * 1024
