"""Kills while a cache is written."""

import random
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from cache_shards import NAME, WIDE, entry
from cache_writer import CHUNK

from enginecast.cache.store.claims import sweep
from enginecast.cache.store.folders import Encodings, open_store
from enginecast.cache.store.index import Index, open_index
from enginecast.cache.store.shard import SUFFIX
from enginecast.cache.store.spec import EncoderSpec
from faults.campaign import Campaign, Sizes, Tally, environment

SEED = 43
WRITER = Path(__file__).parents[2] / "tests" / "support" / "cache_writer.py"
CHUNKS = 120
"""Commits of a cache.  A writer is done with them after some 20 kills."""


def start(root: Path, chunks: int) -> "subprocess.Popen[str]":
    """A process that commits entries; see cache_writer.py."""
    command = [sys.executable, str(WRITER), str(root), str(chunks)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment())


def require_right(
    index: Index, numbers: int, spec: EncoderSpec = WIDE, *, doubles: bool = False
) -> int:
    """Every entry is what its number says; how many there are."""
    assert index.errors == ()
    assert index.doubles == 0 or doubles
    wanted = [entry(number, spec) for number in range(numbers)]
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


def _killed(root: Path, after: float) -> tuple[bool, list[str]]:
    """Kill a writer some seconds after it began; whether it was alive, and what it had reported."""
    writer = start(root, CHUNKS)
    assert writer.stdout is not None
    assert writer.stdout.readline() == "ready\n"
    time.sleep(after)
    writer.kill()
    said = writer.stdout.read().splitlines(keepends=True)
    writer.stdout.close()
    alive = writer.wait() != 0
    return alive, [line.strip() for line in said if line.endswith("\n")]


def _harm(encodings: Encodings, reported: set[str]) -> str:
    """What is wrong after a kill; what it left is swept."""
    there = {path.name for path in encodings.shard_folder.glob("*")}
    if not reported <= there:
        return f"shards that were reported are gone: {sorted(reported - there)}"
    if not all(name.endswith(SUFFIX) for name in there):
        return f"half a shard is among {sorted(there)}"
    try:
        require_right(open_index(encodings), CHUNKS * CHUNK)
    except AssertionError as error:
        return f"an entry is wrong: {error}"
    sweep(encodings)
    left = {path.name for path in encodings.staging_folder.glob("*")} - {"claims"}
    return f"sweeping left {sorted(left)}" if left else ""


def finish(root: Path) -> str:
    """Let a writer end; what is wrong with the whole cache, if anything."""
    writer = start(root, CHUNKS)
    writer.communicate()
    index = open_index(open_store(root).encodings(NAME))
    if writer.returncode or require_right(index, CHUNKS * CHUNK) != CHUNKS * CHUNK:
        return f"the next fill ended with {writer.returncode} and {len(index)} entries"
    return ""


def kills(count: int, folder: Path) -> Tally:
    """Kill writers one after the other; a new cache where one is complete."""
    tally, chooser = Tally(), random.Random(SEED)
    root, reported = folder / "cache-0", set[str]()
    while tally.injected < count:
        alive, said = _killed(root, chooser.uniform(0.0, 0.06))
        reported |= set(said)
        encodings = open_store(root).encodings(NAME)
        what = f"seed {SEED}, kill {tally.injected}"
        swept = any(encodings.staging_folder.glob("*/*"))
        if wrong := _harm(encodings, reported):
            tally.defect(f"{what}: {wrong}")
        else:
            hit = "in the middle of a write" if swept else "between writes"
            tally.add(f"killed {hit}" if alive else "it was done before", fired=alive)
        if not alive or tally.injected >= count:
            if wrong := finish(root):
                tally.defect(f"{what}: {wrong}")
            root, reported = folder / f"cache-{tally.injected}", set()
    return tally


CAMPAIGNS = (
    Campaign(
        "kills of cache writers",
        "Whenever a writer of a cache is killed, every entry that it reported is there and right,"
        " nothing half is, and the next writer completes the cache.",
        Sizes(quick=4, full=500),
        kills,
        fires=0.9,
    ),
)
