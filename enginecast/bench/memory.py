"""What a contender takes of the machine's memory."""

import gc
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
STATUS = Path("/proc/self/smaps_rollup")


def resident() -> int:
    """Bytes of this process in memory, shared pages by their share; 0 where there is no /proc."""
    gc.collect()
    if not STATUS.exists():
        return 0
    lines = STATUS.read_text(encoding="utf-8").splitlines()
    found = next((line.split()[1] for line in lines if line.startswith("Pss:")), "0")
    return int(found) * 1024


def on_gpu() -> int:
    """Bytes that are taken on the current GPU, by whomever; 0 where nothing counts them."""
    try:
        import torch
    except ImportError:
        return 0
    if not torch.cuda.is_available():
        return 0
    free, whole = torch.cuda.mem_get_info()
    return int(whole - free)


def taken(make: Callable[[], T], measure: Callable[[], int]) -> tuple[T, int]:
    """What `make` gives, and the bytes that it left in memory."""
    before = measure()
    made = make()
    return made, max(measure() - before, 0)
