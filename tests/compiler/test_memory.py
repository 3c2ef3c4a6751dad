"""What a step took of memory, and what there is."""

import mmap
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from enginecast.compiler import memory
from enginecast.compiler.memory import (
    anonymous,
    watched,
)
from enginecast.compiler.steps import Steps
from enginecast.runtime.device import machine
from enginecast.runtime.device.machine import available

SIZE = 96 << 20
FREED = """
import os, sys
from enginecast.compiler.memory import anonymous, peak_resident, watched
before = anonymous()
with watched() as peak:
    block = bytearray(os.urandom(1 << 20) * (int(sys.argv[1]) >> 20))
    peak.look()
    del block
print(peak.anonymous - before, anonymous() - before, peak_resident())
"""
needs_proc = pytest.mark.skipif(not memory.STATM.exists(), reason="the system has no /proc")


@needs_proc
def test_memory_that_is_freed_again_was_seen() -> None:
    # In a process of its own: garbage of other tests that is freed meanwhile would count.
    done = subprocess.run(
        [sys.executable, "-c", FREED, str(SIZE)], capture_output=True, text=True, check=True
    )
    seen, left, resident = map(int, done.stdout.split())
    assert seen > SIZE * 0.9
    assert left < SIZE * 0.5
    assert resident >= seen


@needs_proc
def test_a_mapped_file_does_not_count(tmp_path: Path) -> None:
    file = tmp_path / "weights"
    file.write_bytes(os.urandom(1 << 20) * (SIZE >> 20))
    with file.open("rb") as stream, watched() as peak:
        before = anonymous()
        with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            assert sum(mapped[position] for position in range(0, SIZE, 4096)) > 0
            peak.look()
    assert peak.anonymous - before < SIZE * 0.5


@needs_proc
def test_a_step_tells_its_memory() -> None:
    steps = Steps()
    with steps("small"):
        pass
    with steps("large"):
        block = bytearray(os.urandom(1 << 20) * (SIZE >> 20))
    assert len(block) == SIZE
    assert steps.memory["large"] - steps.memory["small"] > SIZE * 0.5


LEFT = """
import sys
from enginecast.compiler.memory import anonymous, trim
blocks = [bytearray(b"1" * (1 << 16)) for _ in range(1024)]
kept = bytearray(b"1" * (1 << 16))  # lies above them, so that the heap cannot shrink
del blocks
before = anonymous()
trim()
print(before - anonymous(), len(kept))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries give back alone")
def test_freed_blocks_are_given_back() -> None:
    done = subprocess.run([sys.executable, "-c", LEFT], capture_output=True, text=True, check=True)
    assert int(done.stdout.split()[0]) > 32 << 20


def test_a_container_may_have_less_than_its_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = available()
    if host is None:
        pytest.skip("the system does not tell")
    limit, used = tmp_path / "memory.max", tmp_path / "memory.current"
    monkeypatch.setattr(machine, "CGROUPS", ((limit, used),))
    limit.write_text("5000000\n")
    used.write_text("2000000\n")
    assert available() == 3_000_000
    limit.write_text("max\n")
    assert available() != 3_000_000
