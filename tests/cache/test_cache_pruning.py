"""Pruning: what is not needed goes, no entry is lost, and who is reading goes on."""

import os
from pathlib import Path

import numpy as np
import pytest
from cache_entries import entries, fill, held, texts

from enginecast.cache.store.folders import Encodings, open_store
from enginecast.cache.store.index import open_index
from enginecast.cache.store.shard import shard_name
from enginecast.cache.upkeep.checking import check_store
from enginecast.cache.upkeep.pruning import Pruned, prune_store

TEXTS = texts(40)
MADE = entries(TEXTS)


def prune(encodings: Encodings, *keep: str, dry_run: bool = False, size: int = 10**6) -> Pruned:
    store = open_store(encodings.folder.parent)
    (pruned,) = prune_store(store, keep=keep or None, dry_run=dry_run, shard_bytes=size)
    return pruned


def on_disk(encodings: Encodings) -> int:
    """Bytes of all but the index, which is derived."""
    files = [path for path in encodings.folder.rglob("*") if path.is_file()]
    return sum(path.stat().st_size for path in files if path.name != "index.safetensors")


def listing(encodings: Encodings) -> dict[str, int]:
    files = [path for path in encodings.folder.rglob("*") if path.is_file()]
    return {str(path): path.stat().st_ino for path in files}


def require_whole(encodings: Encodings) -> None:
    (checked,) = check_store(open_store(encodings.folder.parent))
    assert checked.damages == ()
    for wanted in MADE:
        place = open_index(encodings).find(wanted.key)
        if place is None:
            continue
        got = open_index(encodings).shards[place.shard].entry(place.text)
        assert (got.text, got.ids.tolist()) == (wanted.text, wanted.ids.tolist())
        for name, values in wanted.outputs.items():
            np.testing.assert_array_equal(got.outputs[name], values)


def test_small_shards_are_joined(tmp_path: Path) -> None:
    encodings = fill(tmp_path / "c", *(MADE[at : at + 4] for at in range(0, 40, 4)))
    before = on_disk(encodings)
    planned = prune(encodings, dry_run=True)
    done = prune(encodings)
    assert planned == done
    assert (done.rewritten, done.made, done.kept, done.doubles) == (10, 1, 40, 0)
    assert done.freed == before - on_disk(encodings) > 0
    assert held(encodings) == sorted(TEXTS)
    require_whole(encodings)
    assert prune(encodings) == Pruned("text_encoder", 0, 0, 0, 0, 0, 0, 40, 0)


def test_doubles_go(tmp_path: Path) -> None:
    # as after a join that was killed before it removed the old shards
    small = [MADE[at : at + 3] for at in range(37)]
    whole = shard_name([entry.key for entry in MADE])
    before = [one for one in small if shard_name([entry.key for entry in one]) < whole]
    assert before  # whose doubles lie behind them
    encodings = fill(tmp_path / "c", MADE, *small)
    assert open_index(encodings).doubles == 111
    done = prune(encodings)
    assert (done.doubles, done.rewritten, done.made, done.kept) == (111, 37, 0, 40)
    assert held(encodings) == sorted(TEXTS)


def test_only_the_texts_to_keep_stay_and_the_empty_one(tmp_path: Path) -> None:
    encodings = fill(tmp_path / "c", MADE[:20], MADE[20:])
    before = on_disk(encodings)
    wanted = [TEXTS[3], TEXTS[30], "w1 never filled"]
    planned = prune(encodings, *wanted, dry_run=True)
    assert held(encodings) == sorted(TEXTS)
    done = prune(encodings, *wanted)
    assert planned == done
    assert (done.unwanted, done.kept) == (37, 3)
    assert held(encodings) == sorted(["", TEXTS[3], TEXTS[30]])
    assert done.freed == before - on_disk(encodings)
    require_whole(encodings)


def test_dry_run_changes_nothing(tmp_path: Path) -> None:
    encodings = fill(tmp_path / "c", MADE[:20], MADE[20:], MADE[:3])
    (encodings.folder / "quarantine").mkdir()
    (encodings.folder / "quarantine" / "a.safetensors").write_bytes(b"12345")
    left = encodings.staging_folder / "dead"
    left.mkdir()
    (left / "part").write_bytes(b"123")
    before = listing(encodings)
    planned = prune(encodings, dry_run=True)
    assert listing(encodings) == before
    size = on_disk(encodings)
    assert prune(encodings) == planned
    assert planned.freed == size - on_disk(encodings)
    assert (planned.leftovers, planned.quarantined) == (1, 1)
    assert not left.exists()
    assert not list((encodings.folder / "quarantine").iterdir())


def test_a_kill_between_commit_and_removal_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encodings = fill(tmp_path / "c", *(MADE[at : at + 8] for at in range(0, 40, 8)))
    child = os.fork()
    if child == 0:
        from enginecast.cache.upkeep import pruning

        monkeypatch.setattr(pruning, "remove_file", lambda *_: os.kill(os.getpid(), 9))
        try:
            prune(encodings)
        finally:
            os._exit(7)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == 9
    assert open_index(encodings).doubles == 40
    assert prune(encodings).doubles == 40
    assert held(encodings) == sorted(TEXTS)
    require_whole(encodings)
