"""Writers that are killed at any moment lose nothing that they committed, and damage nothing."""

import random
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from cache_shards import NAME, WIDE, entry, made
from cache_writer import CHUNK

from enginecast.cache.store.claims import sweep
from enginecast.cache.store.index import Index, open_index
from enginecast.cache.store.shard import SUFFIX
from enginecast.cache.store.store import Encodings, open_store

WRITER = Path(__file__).parent / "cache_writer.py"


def start(root: Path, chunks: int) -> subprocess.Popen[str]:
    command = [sys.executable, str(WRITER), str(root), str(chunks)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def killed(writer: subprocess.Popen[str], after: float) -> list[str]:
    """Kill a writer some seconds after it began; what it said it had committed."""
    assert writer.stdout is not None
    assert writer.stdout.readline() == "ready\n"
    time.sleep(after)
    writer.kill()
    said = writer.stdout.read().splitlines(keepends=True)
    writer.stdout.close()
    writer.wait()
    return [line.strip() for line in said if line.endswith("\n")]


def require_right(index: Index, numbers: int) -> int:
    """Every entry is what its number says; how many there are."""
    assert index.errors == ()
    assert index.doubles == 0
    wanted = [entry(number, WIDE) for number in range(numbers)]
    there = 0
    for one in wanted:
        place = index.find(one.key)
        if place is None:
            continue
        there += 1
        found = index.shards[place.shard].entry(place.text)
        assert (found.text, found.ids.tolist()) == (one.text, one.ids.tolist())
        assert index.shards[place.shard].is_whole(place.text)
        for name, values in one.outputs.items():
            np.testing.assert_array_equal(found.outputs[name], values)
    assert there == len(index)
    return there


def kill_often(root: Path, kills: int, chunks: int) -> tuple[Encodings, int]:
    """Kill writers one after the other.

    Returns:
        How many were hit while they were writing: they left something to sweep.
    """
    chooser, reported, hits, done = random.Random(0), set[str](), 0, 0
    while done < kills or (not hits and done < 3 * kills):
        done += 1
        said = killed(start(root, chunks), chooser.uniform(0.0, 0.06))
        reported |= set(said)
        encodings = open_store(root).encodings(NAME)
        there = {path.name for path in encodings.shard_folder.glob("*")}
        assert reported <= there
        assert all(name.endswith(SUFFIX) for name in there)  # none, where the first came late
        require_right(open_index(encodings), chunks * CHUNK)
        hits += bool(sweep(encodings))
        assert [path.name for path in encodings.staging_folder.iterdir()] in ([], ["claims"])
    return encodings, hits


def finish(root: Path, chunks: int) -> None:
    writer = start(root, chunks)
    writer.communicate()
    assert writer.returncode == 0


def test_kills_lose_nothing(tmp_path: Path) -> None:
    chunks = 120
    encodings, hits = kill_often(tmp_path / "cache", 3, chunks)
    assert hits
    finish(tmp_path / "cache", chunks)
    assert require_right(open_index(encodings), chunks * CHUNK) == chunks * CHUNK
    assert sweep(encodings) == []


@pytest.mark.slow
def test_many_kills_lose_nothing(tmp_path: Path) -> None:
    chunks = 600
    encodings, hits = kill_often(tmp_path / "cache", 20, chunks)
    assert hits > 5
    finish(tmp_path / "cache", chunks)
    assert require_right(open_index(encodings), chunks * CHUNK) == chunks * CHUNK


def test_several_writers_share_the_work(tmp_path: Path) -> None:
    root, chunks = tmp_path / "cache", 40
    made(root, WIDE)
    writers = [start(root, chunks) for _ in range(2)]
    said = [writer.communicate()[0].split() for writer in writers]
    assert [writer.returncode for writer in writers] == [0, 0]
    names = [name for one in said for name in one if name != "ready"]
    assert len(names) == len(set(names)) == chunks
    assert require_right(open_index(open_store(root).encodings()), chunks * CHUNK) == chunks * CHUNK
