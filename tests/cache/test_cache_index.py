"""The index: right for every key, quick to refresh, and never trusted where a shard has changed."""

import random
from pathlib import Path

import numpy as np
import pytest
from cache_shards import entries, entry, flip, keyed, made

from enginecast.cache.store import mapping
from enginecast.cache.store.folders import Encodings
from enginecast.cache.store.index import (
    FILE_NAME,
    Index,
    open_index,
    read_index,
)
from enginecast.errors import CacheError


@pytest.fixture
def encodings(tmp_path: Path) -> Encodings:
    return made(tmp_path / "cache")


def keys_of(index: Index) -> list[bytes]:
    """The keys of all rows, in their order."""
    places = [index.row(number) for number in range(len(index))]
    return [index.shards[place.shard].key(place.text) for place in places]


def in_order(encodings: Encodings) -> list[bytes]:
    """What the keys of all rows should be: the shards by name, of equal keys the first."""
    index = [open_index(encodings).shards[n] for n in range(len(open_index(encodings).shards))]
    return list(dict.fromkeys(bytes(key) for shard in index for key in shard.keys))


def test_every_key_is_found_where_it_is(encodings: Encodings) -> None:
    for begin in (0, 9, 18):
        encodings.commit(entries(range(begin, begin + 9)))
    index = open_index(encodings)
    assert len(index) == 27
    assert index.doubles == 0
    for number in range(27):
        wanted = entry(number)
        place = index.find(wanted.key)
        assert place is not None
        assert index.shards[place.shard].text(place.text) == wanted.text
    assert index.find(bytes(16)) is None
    assert keys_of(index) == in_order(encodings)
    with pytest.raises(IndexError, match="row 27 of 27"):
        index.row(27)


def test_keys_that_are_equal_in_one_half(encodings: Encodings) -> None:
    chooser = random.Random(0)
    halves = [bytes(8), b"\xff" * 8, *(chooser.randbytes(8) for _ in range(4))]
    keys = [one + other for one in halves for other in halves]
    chooser.shuffle(keys)
    there, absent = keys[:24], keys[24:]
    for begin in range(0, 24, 5):
        encodings.commit(keyed(there[begin : begin + 5]))
    index = open_index(encodings)
    assert (index.find_all(absent) == -1).all()
    shards, texts = index.locations(index.find_all(there))
    found = [index.shards[s].key(t) for s, t in zip(shards, texts, strict=True)]
    assert found == there
    array = np.frombuffer(b"".join(keys), np.uint8).reshape(-1, 16)
    np.testing.assert_array_equal(index.find_all(array), index.find_all(keys))


def fill_many(encodings: Encodings, shards: int) -> list[bytes]:
    for number in range(shards):
        encodings.commit(entries([2 * number, 2 * number + 1]))
    return [entry(number).key for number in range(2 * shards)]


def test_a_damaged_index_is_made_again(encodings: Encodings) -> None:
    keys = fill_many(encodings, 20)
    open_index(encodings)
    file = encodings.folder / FILE_NAME
    data = file.read_bytes()
    chooser = random.Random(2)
    for _ in range(300):
        bit = chooser.randrange(len(data) * 8)
        flip(file, bit)
        assert read_index(encodings) is None
        flip(file, bit)
    for damaged in (b"", data[:7], data[:300], data[:-1], b"\x00" * len(data)):
        file.write_bytes(damaged)
        index = open_index(encodings)
        assert (index.find_all(keys) >= 0).all()
        assert read_index(encodings) is not None


def test_no_row_of_another_text_is_read_from_a_shard_that_was_replaced(
    encodings: Encodings,
) -> None:
    encodings.commit(entries(range(3)))
    index = open_index(encodings)
    encodings.commit(entries([2, 1, 0]))  # the same keys, and so the same name
    with pytest.raises(CacheError, match="replaced since the cache was opened"):
        index.shards[0].outputs(0)
    assert open_index(encodings, index).shards[0].text(0) == entry(2).text


@pytest.fixture
def without_mapping(monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that can map no file."""

    def refuse(descriptor: int, size: int) -> None:
        raise OSError(19, "No such device")

    monkeypatch.setattr(mapping, "map_file", refuse)


@pytest.mark.usefixtures("without_mapping")
def test_no_row_of_another_text_is_read_where_nothing_is_mapped(encodings: Encodings) -> None:
    path = encodings.commit(entries([0, 7]))  # of equal sizes
    shard = open_index(encodings).shards[0]
    assert shard.text(0) == entry(0).text
    encodings.commit(entries([7, 0]))  # the same keys, and so the same name
    for read in (shard.outputs, shard.entry, shard.is_whole):
        with pytest.raises(
            CacheError, match=r"no longer exists\n.*replaced it; open the cache again"
        ):
            read(0)
    path.unlink()
    with pytest.raises(CacheError, match=r"no longer exists\n.*replaced it; open the cache again"):
        shard.outputs(0)
