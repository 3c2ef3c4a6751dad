"""Merging: every entry comes over once, nothing is written where something is wrong."""

from pathlib import Path

import numpy as np
import pytest
from cache_entries import (
    TOKENIZER_JSON,
    byte_of,
    entries,
    fill,
    flip,
    held,
    spec_with,
    texts,
)

from enginecast.cache.store.folders import Encodings, open_store
from enginecast.cache.store.index import open_index
from enginecast.cache.upkeep.checking import check_store
from enginecast.cache.upkeep.merging import Merged, merge
from enginecast.errors import CacheError

TEXTS = texts(30)
MADE = entries(TEXTS)


def opened(root: Path, name: str = "text_encoder") -> Encodings:
    return open_store(root).encodings(name)


def require_whole(root: Path) -> None:
    encodings = opened(root)
    (checked,) = check_store(open_store(root))
    assert checked.damages == ()
    index = open_index(encodings)
    assert (len(index), index.doubles) == (30, 0)
    assert held(encodings) == sorted(TEXTS)
    for wanted in MADE:
        place = index.find(wanted.key)
        assert place is not None
        outputs = index.shards[place.shard].outputs(place.text)
        for name, values in wanted.outputs.items():
            np.testing.assert_array_equal(outputs[name], values)


def test_disjoint_caches_are_linked_into_a_new_one(tmp_path: Path) -> None:
    parts = [fill(tmp_path / "a", MADE[:10], MADE[10:15]), fill(tmp_path / "b", MADE[15:])]
    done = merge([tmp_path / "a", tmp_path / "b"], tmp_path / "out")
    assert done == [Merged("text_encoder", 3, 0, added=30, there=0, texts=30)]
    require_whole(tmp_path / "out")
    inodes = {path.stat().st_ino for part in parts for path in part.shard_paths()}
    assert {path.stat().st_ino for path in opened(tmp_path / "out").shard_paths()} == inodes
    assert opened(tmp_path / "out").tokenizer_file.read_bytes() == TOKENIZER_JSON
    assert opened(tmp_path / "out").about == parts[0].about


def test_an_existing_cache_gets_what_it_lacks(tmp_path: Path) -> None:
    out = fill(tmp_path / "out", MADE[:20])
    before = out.shard_paths()[0].stat().st_ino
    fill(tmp_path / "a", MADE[10:])
    done = merge([tmp_path / "out", tmp_path / "a"], tmp_path / "out")
    assert done == [Merged("text_encoder", 0, 1, added=10, there=10, texts=30)]
    assert before in {path.stat().st_ino for path in out.shard_paths()}
    require_whole(tmp_path / "out")
    again = merge([tmp_path / "a"], tmp_path / "out")
    assert again == [Merged("text_encoder", 0, 0, added=0, there=20, texts=30)]


def test_equal_names_of_other_specs_are_refused(tmp_path: Path) -> None:
    fill(tmp_path / "a", MADE)
    other = spec_with(precision="bf16", max_length=7)
    fill(tmp_path / "b", entries(TEXTS[:4], other), spec=other)
    with pytest.raises(CacheError, match="precision: 'fp32', 'bf16'; max_length: 8, 7"):
        merge([tmp_path / "a", tmp_path / "b"], tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with pytest.raises(CacheError, match="precision"):
        merge([tmp_path / "b"], tmp_path / "a")


@pytest.mark.parametrize("tensor", ["keys", "rows.last_hidden_state"])
def test_a_damaged_shard_is_named_and_nothing_written(tmp_path: Path, tensor: str) -> None:
    fill(tmp_path / "a", MADE[:10])
    damaged = fill(tmp_path / "b", MADE[10:20], MADE[20:]).shard_paths()[1]
    flip(damaged, byte_of(damaged, tensor))
    with pytest.raises(CacheError, match=f"{damaged}: damaged: .*; nothing was merged") as raised:
        merge([tmp_path / "a", tmp_path / "b"], tmp_path / "out")
    assert f"cache verify {tmp_path / 'b'}" in raised.value.hint
    assert not (tmp_path / "out").exists()
