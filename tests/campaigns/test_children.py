"""A child for each item: what it wrote, how it died, and which of its limits ended it."""

import os
import signal
from pathlib import Path

import harness
import pytest
from harness import Ended, each


def work(item: str, folder: Path) -> None:
    """Do what the item says."""
    (folder / "seen").write_text(item, encoding="utf-8")
    match item:
        case "raise":
            raise ValueError("not this one")
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "spin":
            while True:
                pass
        case "memory":
            bytearray(1 << 40)
        case "wait":
            signal.pause()


def run(item: str, place: Path) -> Ended[str]:
    (ended,) = each([item], work, place, seconds=1, memory=12 << 30, keep=str)
    return ended


def test_items_are_done_and_folders_go(tmp_path: Path) -> None:
    seen = {}
    for ended in each(["a", "b", "c"], work, tmp_path, seconds=60, jobs=2):
        assert not ended.status
        assert not ended.late
        seen[ended.item] = (ended.folder / "seen").read_text(encoding="utf-8")
    assert seen == {"a": "a", "b": "b", "c": "c"}
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("item", "death", "timed_out"),
    [
        ("raise", "exit code 1: ValueError: not this one", False),
        ("kill", "killed by SIGKILL", False),
        ("memory", "exit code 1: MemoryError", False),
        ("spin", "killed by SIGXCPU", True),
    ],
)
def test_how_it_died_is_said(item: str, death: str, timed_out: bool, tmp_path: Path) -> None:
    ended = run(item, tmp_path)
    assert ended.status
    assert (ended.death, ended.timed_out) == (death, timed_out)
    assert ended.outcome == ("timed out" if timed_out else "crashed")
    assert (tmp_path / item / "seen").exists()


def test_one_that_waits_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "PATIENCE", 0.3)
    ended = run("wait", tmp_path)
    assert ended.late
    assert not ended.timed_out
