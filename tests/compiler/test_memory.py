"""What a step took of memory, and what there is."""

import ctypes
import gc
import mmap
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from enginecast.compiler import memory
from enginecast.compiler.memory import (
    FEW,
    FEWER,
    anonymous,
    fewer_collections,
    keeping_freed,
    trim,
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


@pytest.mark.parametrize(
    ("before", "meanwhile"),
    [((700, 10, 5), (FEWER, 10, 5)), ((0, 10, 10), (0, 10, 10)), ((10**6, 9, 9), (10**6, 9, 9))],
)
def test_garbage_is_looked_for_as_before_once_an_export_ended(
    before: tuple[int, int, int], meanwhile: tuple[int, int, int]
) -> None:
    found = gc.get_threshold()
    gc.set_threshold(*before)
    try:
        with fewer_collections():
            assert gc.get_threshold() == meanwhile
        assert gc.get_threshold() == before
    finally:
        gc.set_threshold(*found)


AGAIN = """
import resource, sys
from enginecast.compiler.memory import anonymous, keeping_freed
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def rounds():
    before = faults()
    for _ in range(8):
        bytearray(b"1") * (48 << 20)
    return faults() - before
start, outside = anonymous(), (rounds(), rounds())[1]
with keeping_freed(int(sys.argv[1])):
    rounds()
    inside = rounds()
print(outside, inside, rounds(), anonymous() - start)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have no mallopt")
@pytest.mark.parametrize(
    ("elements", "environment", "kept"),
    [(1000, {}, True), (FEW + 1, {}, False), (1000, {"MALLOC_ARENA_MAX": "2"}, False)],
)
def test_freed_memory_is_used_again_during_an_export_of_a_model_that_is_not_large(
    elements: int, environment: dict[str, str], kept: bool
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", AGAIN, str(elements)],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, **environment},
    )
    before, inside, after, left = map(int, done.stdout.split())
    assert (inside < before * 0.1) == kept
    assert after > before * 0.5
    assert left < 16 << 20


def test_a_c_library_without_the_call_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda _: object())
    trim()
    with keeping_freed(1):
        pass


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
