"""Several writers of one cache share the work; faults/cache_kills.py kills them."""

from pathlib import Path

from cache_shards import WIDE, made
from cache_writer import CHUNK
from faults.cache_kills import CHUNKS, require_right, start

from enginecast.cache.store.folders import open_store
from enginecast.cache.store.index import open_index


def test_several_writers_share_the_work(tmp_path: Path) -> None:
    root = tmp_path / "cache"
    made(root, WIDE)
    writers = [start(root, CHUNKS) for _ in range(2)]
    said = [writer.communicate()[0].split() for writer in writers]
    assert [writer.returncode for writer in writers] == [0, 0]
    names = [name for one in said for name in one if name != "ready"]
    assert len(names) == len(set(names)) == CHUNKS
    there = require_right(open_index(open_store(root).encodings()), CHUNKS * CHUNK)
    assert there == CHUNKS * CHUNK
