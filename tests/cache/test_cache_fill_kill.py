"""Fills that are killed: nothing is lost, nothing is there twice, nothing is done again."""

import random
import time
from pathlib import Path

from fill_fixtures import (
    colour_bundle,
    colour_captions,
    entries_of,
    stamps,
    write_captions,
)
from fill_processes import Forked, Running, Start

from enginecast.cache.store.folders import Encodings, open_store
from enginecast.cache.store.index import open_index


def there(cache: Path) -> Encodings | None:
    if not (cache / "text_encoder" / "spec.json").exists():
        return None
    return open_store(cache).encodings("text_encoder")


def shards_of(cache: Path) -> dict[str, tuple[int, int]]:
    where = there(cache)
    return {} if where is None else stamps(where)


def kill_at_random(running: Running, cache: Path, number: int, chance: random.Random) -> None:
    """Kill a fill: every other time once it stored something, else at any moment."""
    before = len(shards_of(cache))
    if number % 2:
        until = time.monotonic() + 30
        wanted = before + chance.randint(1, 4)
        while len(shards_of(cache)) < wanted and time.monotonic() < until:
            time.sleep(0.001)
    time.sleep(chance.uniform(0, 0.01 if number % 2 else 2 * START[type(running).__name__]))
    running.kill()
    running.wait()


START = {"Forked": 0.05, "Popen": 1.5}
"""Seconds, about, until a fill stores its first shard."""


def fill_with_kills(
    start: Start, encoder: Path, texts: list[str], folder: Path, kills: int, shard_size: str
) -> None:
    """Fill, kill and fill again, and look at everything each time."""
    chance = random.Random(kills)
    path, cache = write_captions(folder, texts), folder / "cache"
    arguments = (encoder, "--prompts", path, "-o", cache, "--shard-size", shard_size)
    unfinished = 0
    for number in range(kills):
        before = shards_of(cache)
        kill_at_random(start(*arguments), cache, number, chance)
        after = shards_of(cache)
        assert before.items() <= after.items(), "a committed shard was written again"
        require_whole(cache, texts)
        unfinished += bool(after) and len(open_index(opened(cache))) < len(texts) + 1
    assert unfinished >= kills // 2, "most kills should hit a fill at work"
    before = shards_of(cache)
    assert start(*arguments).wait() == 0
    assert before.items() <= shards_of(cache).items()
    require_whole(cache, texts, complete=True)
    assert leftovers(cache) == []
    complete = shards_of(cache)
    assert start(*arguments).wait() == 0
    assert shards_of(cache) == complete


def opened(cache: Path) -> Encodings:
    where = there(cache)
    assert where is not None
    return where


def require_whole(cache: Path, texts: list[str], *, complete: bool = False) -> None:
    """Every entry is whole, none is there twice; all are there where the fill is complete."""
    where = there(cache)
    if where is None:
        assert not complete
        return
    entries = entries_of(where)
    assert len({entry.key for entry in entries}) == len(entries)
    found = {entry.text for entry in entries}
    assert found <= {*texts, ""}
    if complete:
        assert found == {*texts, ""}


def leftovers(cache: Path) -> list[Path]:
    return [path for path in opened(cache).staging_folder.rglob("*") if path.is_file()]


def test_kills_lose_and_double_nothing(tmp_path: Path) -> None:
    encoder = colour_bundle(tmp_path / "colors.bundle")
    fill_with_kills(Forked, encoder, colour_captions(1500), tmp_path, kills=4, shard_size="2kB")


def two_writers(start: Start, encoder: Path, texts: list[str], folder: Path, size: str) -> None:
    path, cache = write_captions(folder, texts), folder / "cache"
    arguments = (encoder, "--prompts", path, "-o", cache, "--shard-size", size)
    writers = [start(*arguments) for _ in range(2)]
    assert [writer.wait() for writer in writers] == [0, 0]
    require_whole(cache, texts, complete=True)
    assert leftovers(cache) == []


def test_two_writers_double_nothing(tmp_path: Path) -> None:
    encoder = colour_bundle(tmp_path / "colors.bundle")
    two_writers(Forked, encoder, colour_captions(800), tmp_path, "5kB")
