"""Caches on disk: one commit is all or nothing, whatever the disk and other writers do."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from cache_shards import ABOUT, SPEC, entries, entry, made, open_folder, read_only

from enginecast.cache.store.folders import Encodings, create_store, open_store
from enginecast.cache.store.index import open_index
from enginecast.cache.store.shard import Entry, open_shard
from enginecast.errors import CacheError, MissingError

ROWS = SPEC.__replace__(outputs=(SPEC.outputs[0].__replace__(width=4096),))


@pytest.fixture
def encodings(tmp_path: Path) -> Encodings:
    return made(tmp_path / "cache")


@pytest.fixture
def small_disk() -> Iterator[Path]:
    """A disk of one megabyte."""
    with open_folder() as folder:
        mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
        done = subprocess.run(mount, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"cannot mount a small disk: {done.stderr.strip()}")
        try:
            yield folder
        finally:
            subprocess.run(["umount", str(folder)], check=True)


def wide_entries(begin: int, count: int) -> list[Entry]:
    """64 kB each, no two alike."""
    values = {"last_hidden_state": np.ones((8, 4096), ml_dtypes.bfloat16)}
    numbers = range(begin, begin + count)
    return [Entry(entry(n).key, f"text {n}", entry(n).ids, values) for n in numbers]


def files_of(encodings: Encodings) -> list[str]:
    return sorted(path.name for path in encodings.folder.rglob("*") if path.is_file())


def test_a_full_disk_loses_nothing(small_disk: Path) -> None:
    encodings = made(small_disk / "cache", ROWS)
    first = encodings.commit(wide_entries(0, 4))
    before = files_of(encodings)
    with pytest.raises(MissingError, match="the disk is full; what was committed") as caught:
        encodings.commit(wide_entries(4, 40))
    assert caught.value.exit_code == 3
    assert "run the same command again" in caught.value.hint
    assert files_of(encodings) == before
    assert open_shard(first, ROWS).is_whole(3)
    encodings.commit(wide_entries(4, 4))
    assert len(open_index(encodings)) == 8


def test_a_read_only_cache_says_so() -> None:
    with open_folder() as folder:
        encodings = made(folder / "cache")
        with read_only(folder):
            with pytest.raises(CacheError, match="Permission denied"):
                encodings.commit(entries(range(3)))
            with pytest.raises(CacheError, match="Permission denied"):
                create_store(folder / "cache").add("another", SPEC, ABOUT, b"{}")
            with pytest.raises(CacheError, match="Permission denied"):
                create_store(folder / "other")
            assert made(folder / "cache").spec == SPEC


def test_encoders_are_asked_for_by_name(tmp_path: Path) -> None:
    store = create_store(tmp_path / "cache")
    with pytest.raises(CacheError, match="no encoder yet"):
        store.encodings()
    store.add("clip", SPEC, ABOUT, b"{}")
    assert store.encodings().name == "clip"
    store.add("t5", SPEC.__replace__(max_length=9), ABOUT, b"{}")
    assert open_store(store.root).encodings("t5").spec.max_length == 9
    with pytest.raises(CacheError, match="several encoders; name one: it holds clip, t5"):
        store.encodings()
    with pytest.raises(CacheError, match="no encoder 'vae': it holds clip, t5"):
        store.encodings("vae")


def test_what_is_not_a_cache_is_left_alone(tmp_path: Path) -> None:
    with pytest.raises(CacheError, match="but it does not exist"):
        open_store(tmp_path / "missing")
    with pytest.raises(CacheError, match=r"it has no cache\.json"):
        open_store(tmp_path)
    (tmp_path / "photo.png").touch()
    with pytest.raises(CacheError, match=r"or an empty folder, got one with photo\.png"):
        create_store(tmp_path)
    with pytest.raises(CacheError, match="Not a directory"):
        create_store(tmp_path / "photo.png")
    assert [path.name for path in tmp_path.iterdir()] == ["photo.png"]


def test_a_cache_of_another_version_is_refused(encodings: Encodings) -> None:
    mark = encodings.folder.parent / "cache.json"
    content = json.loads(mark.read_text())
    mark.write_text(json.dumps({**content, "version": 2}))
    for open_it in (open_store, create_store):
        with pytest.raises(CacheError, match=r"expected version 1 of enginecast-cache, got 2"):
            open_it(encodings.folder.parent)
    mark.write_text("{")
    with pytest.raises(CacheError, match=r"cache\.json: Input data was truncated"):
        open_store(encodings.folder.parent)


def test_an_edited_spec_is_refused(encodings: Encodings) -> None:
    file = encodings.folder / "spec.json"
    text = file.read_text()
    file.write_text(text.replace('"max_length": 8', '"max_length": 9'))
    store = open_store(encodings.folder.parent)
    with pytest.raises(CacheError, match="it was edited or damaged\nPut the original back"):
        store.encodings()
    file.write_text(text.replace('"max_length": 8', '"max_length": 0'))
    with pytest.raises(CacheError, match=r"spec\.json: .*max_length"):
        store.encodings()
    file.write_text(text)
    assert store.encodings().spec == SPEC
