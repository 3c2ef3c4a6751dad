"""Merging: every entry comes over once, nothing is written where something is wrong."""

import errno
import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
from cache_entries import (
    SPEC,
    TOKENIZER_JSON,
    byte_of,
    entries,
    fill,
    flip,
    held,
    spec_with,
    texts,
)

from enginecast.cache.store.folders import Encodings, create_store, open_store
from enginecast.cache.store.index import open_index
from enginecast.cache.store.records import (
    Failure,
    Truncation,
    read_failures,
    read_truncated,
    record,
)
from enginecast.cache.upkeep import merging
from enginecast.cache.upkeep.checking import Examined, check_store, examine_all
from enginecast.cache.upkeep.merging import Merged, merge
from enginecast.cache.upkeep.pruning import prune_store
from enginecast.cache.upkeep.rewriting import only_keeper
from enginecast.errors import CacheError, UsageError

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


def test_equal_shards_and_overlaps_come_over_once(tmp_path: Path) -> None:
    fill(tmp_path / "a", MADE[:10], MADE[10:20])
    fill(tmp_path / "b", MADE[:10], MADE[12:26])
    fill(tmp_path / "c", MADE[20:])
    done = merge([tmp_path / name for name in "abc"], tmp_path / "out")
    # b: one shard is there, of one 6 of 14 are new; c: 4 of 10
    assert done == [Merged("text_encoder", 2, 2, added=30, there=24, texts=30)]
    require_whole(tmp_path / "out")


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


def test_other_encoders_lie_beside_each_other(tmp_path: Path) -> None:
    fill(tmp_path / "a", MADE)
    other = spec_with(precision="bf16")
    fill(tmp_path / "b", entries(TEXTS[:4], other), spec=other, name="second")
    done = merge([tmp_path / "a", tmp_path / "b"], tmp_path / "out")
    assert [(one.name, one.texts) for one in done] == [("second", 4), ("text_encoder", 30)]
    assert opened(tmp_path / "out", "second").spec == other


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


def test_a_damaged_output_is_refused(tmp_path: Path) -> None:
    fill(tmp_path / "a", MADE)
    damaged = fill(tmp_path / "out", MADE).shard_paths()[0]  # of the same name
    flip(damaged, byte_of(damaged, "keys"))
    with pytest.raises(CacheError, match=f"{damaged}: damaged"):
        merge([tmp_path / "a"], tmp_path / "out")
    check_store(open_store(tmp_path / "out"))
    merge([tmp_path / "a"], tmp_path / "out")
    require_whole(tmp_path / "out")


def test_a_damaged_tokenizer_is_refused(tmp_path: Path) -> None:
    source = fill(tmp_path / "a", MADE)
    source.tokenizer_file.write_bytes(TOKENIZER_JSON.replace(b"w12", b"v12"))
    with pytest.raises(CacheError, match=r"tokenizer.json: expected the tokenizer"):
        merge([tmp_path / "a"], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_shards_are_copied_where_they_cannot_be_linked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = fill(tmp_path / "a", MADE[:10], MADE[10:])
    create_store(tmp_path / "out")

    def refuse(*_: object) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    with monkeypatch.context() as patch:
        patch.setattr(os, "link", refuse)  # a second disk is not available here
        merge([tmp_path / "a"], tmp_path / "out")
    require_whole(tmp_path / "out")
    inodes = {path.stat().st_ino for path in source.shard_paths()}
    assert not inodes & {path.stat().st_ino for path in opened(tmp_path / "out").shard_paths()}
    assert list(opened(tmp_path / "out").staging_folder.iterdir()) == []


def test_what_failed_comes_along_unless_it_is_stored_by_now(tmp_path: Path) -> None:
    first, second = fill(tmp_path / "a", MADE[:10]), fill(tmp_path / "b", MADE[10:])
    stored = Failure(TEXTS[12], 3, "not finite", MADE[12].key)
    failed = Failure("w1 w1 w1", 4, "not finite", b"k" * 16)
    record(first, [stored, failed])
    record(second, [Truncation("w2 " * 20, 21, MADE[11].key)])
    merge([tmp_path / "a", tmp_path / "b"], tmp_path / "out")
    assert read_failures(opened(tmp_path / "out")) == [failed]
    assert [one.tokens for one in read_truncated(opened(tmp_path / "out"))] == [21]


def test_a_cache_whose_shards_are_joined_meanwhile_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path / "a", MADE[:10], MADE[10:20], MADE[20:])

    def join_then_examine(encodings: Encodings) -> Iterable[Examined]:
        for number, one in enumerate(examine_all(encodings)):
            yield one
            if number == 0:
                assert prune_store(open_store(tmp_path / "a"))[0].made == 1

    monkeypatch.setattr(merging, "examine_all", join_then_examine)
    with pytest.raises(CacheError, match=r"a/text_encoder: .* removed meanwhile; nothing was"):
        merge([tmp_path / "a"], tmp_path / "out")
    assert not (tmp_path / "out").exists()
    monkeypatch.undo()
    merge([tmp_path / "a"], tmp_path / "out")
    require_whole(tmp_path / "out")


def test_wrong_caches_are_refused(tmp_path: Path) -> None:
    fill(tmp_path / "a", MADE)
    with pytest.raises(UsageError, match="expected another cache"):
        merge([tmp_path / "a"], tmp_path / "a")
    with pytest.raises(CacheError, match="expected an embedding cache, but it does not exist"):
        merge([tmp_path / "a", tmp_path / "b"], tmp_path / "out")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(CacheError, match="or an empty folder"):
        merge([tmp_path / "a"], tmp_path / "full")
    fill(tmp_path / "out")
    with only_keeper(opened(tmp_path / "out")), pytest.raises(CacheError, match="is running on it"):
        merge([tmp_path / "a"], tmp_path / "out")
    assert opened(tmp_path / "out").spec == SPEC
