"""What a step took of memory, and what there is."""

import mmap
import os
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
needs_proc = pytest.mark.skipif(not memory.STATM.exists(), reason="the system has no /proc")


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
