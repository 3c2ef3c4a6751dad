"""The machine that this process runs on, in words."""

import os
import platform
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")


def cores() -> int:
    """Those that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def processor() -> str:
    """The model of the CPU."""
    if CPUINFO.exists():
        for line in CPUINFO.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()
