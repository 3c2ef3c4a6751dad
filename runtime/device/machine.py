"""The machine that this process runs on."""

import os
import platform
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
CGROUPS = (
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (
        Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
        Path("/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ),
)


def cores() -> int:
    """Number of CPU cores that this process may use."""
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


def available() -> int | None:
    """Bytes of memory available without swapping; None without /proc.

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
