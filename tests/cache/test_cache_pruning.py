"""Pruning: what is not needed goes, no entry is lost, and who is reading goes on."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from cache_entries import byte_of, entries, fill, flip, held, spec_with, texts

from enginecast.cache.store.folders import Encodings, open_store
from enginecast.cache.store.index import open_index
from enginecast.cache.store.shard import shard_name
from enginecast.cache.upkeep.checking import check_store
from enginecast.cache.upkeep.pruning import Pruned, prune_store
from enginecast.cache.upkeep.rewriting import only_keeper
from enginecast.errors import CacheError

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


def test_joined_shards_have_about_the_size_of_a_full_one(tmp_path: Path) -> None:
    many = texts(160)
    made = entries(many)
    encodings = fill(tmp_path / "c", *(made[at : at + 4] for at in range(0, 160, 4)))
    done = prune(encodings, size=4000)
    sizes = [path.stat().st_size for path in encodings.shard_paths()]
    assert 3 < done.made == len(sizes) < 15
    assert 4000 < max(sizes) < 6000  # a header comes on top
    assert held(encodings) == sorted(many)
    assert prune(encodings, size=4000).rewritten == 0


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


def test_a_join_that_gives_an_old_shard_again_keeps_it(tmp_path: Path) -> None:
    encodings = fill(tmp_path / "c", MADE[:20], MADE[20:], MADE[10:30])
    done = prune(encodings)
    assert (done.doubles, done.made) == (20, 1)
    assert held(encodings) == sorted(TEXTS)
    # again with halves that together are what there is as one shard, too
    encodings.commit(MADE[:20])
    assert prune(encodings).doubles == 20
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


def test_texts_to_keep_are_cut_and_cleaned_as_the_fill_did(tmp_path: Path) -> None:
    spec = spec_with(clean="strip")
    made = entries(["w1 w2", " ".join(["w3"] * 20), "w4"], spec)
    made[1].ids[-1] = 1  # as tokenizers cut: the end stays
    made = [made[0], *entries(["w3 " * 7], spec), made[2]]
    encodings = fill(tmp_path / "c", made, spec=spec)
    prune(encodings, "  w1 w2 ", "w3 " * 30)
    assert held(encodings) == ["w1 w2", "w3 " * 7]


def test_a_file_that_keeps_nothing_is_refused(tmp_path: Path) -> None:
    encodings = fill(tmp_path / "c", MADE[1:])  # without the empty text
    before = listing(encodings)
    with pytest.raises(CacheError, match="none of the texts to keep"):
        prune(encodings, "w1 never filled")
    assert listing(encodings) == before


def test_the_empty_text_alone_is_nothing_to_keep(tmp_path: Path) -> None:
    encodings = fill(tmp_path / "c", MADE)  # as every fill does: with the empty text
    before = listing(encodings)
    for keep in (["w1 never filled"], [""]):
        for dry_run in (True, False):
            with pytest.raises(CacheError, match="none of the texts to keep"):
                prune(encodings, *keep, dry_run=dry_run)
    assert listing(encodings) == before
    only = fill(tmp_path / "only", MADE[:1])
    assert prune(only, "w1 never filled").kept == 1  # nothing to lose


def test_a_cache_without_its_tokenizer_knows_no_texts_to_keep(tmp_path: Path) -> None:
    encodings = fill(tmp_path / "c", MADE)
    encodings.tokenizer_file.unlink()
    with pytest.raises(CacheError, match=r"tokenizer\.json: No such file"):
        prune(encodings, TEXTS[3])
    assert held(encodings) == sorted(TEXTS)


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


def test_what_a_live_writer_stages_stays(tmp_path: Path) -> None:
    encodings = fill(tmp_path / "c", MADE)
    code = """
import sys
from pathlib import Path
from enginecast.cache.store.disk import own_folder
with own_folder(Path(sys.argv[1])) as folder:
    print(folder, flush=True)
    sys.stdin.read()
"""
    command = [sys.executable, "-c", code, str(encodings.staging_folder)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as writer:
        assert writer.stdout
        staged = Path(writer.stdout.readline().strip())
        assert prune(encodings).leftovers == 0
        assert staged.exists()
        writer.kill()
    assert prune(encodings).leftovers == 1
    assert not staged.exists()


@pytest.mark.parametrize("tensor", ["keys", "rows.last_hidden_state"])
def test_a_damaged_shard_is_not_pruned(tmp_path: Path, tensor: str) -> None:
    encodings = fill(tmp_path / "c", MADE[:20], MADE[20:])
    path = encodings.shard_paths()[0]
    flip(path, byte_of(path, tensor))
    before = listing(encodings)
    with pytest.raises(CacheError, match=f"{path.name}: damaged") as raised:
        prune(encodings)
    assert "cache verify" in raised.value.hint
    assert listing(encodings) == before


def test_the_whole_double_of_a_damaged_entry_is_not_removed(tmp_path: Path) -> None:
    encodings = fill(tmp_path / "c", MADE, MADE[:3])
    largest = max(encodings.shard_paths(), key=lambda path: path.stat().st_size)
    flip(largest, byte_of(largest, "text.pooler_output"))  # of the first text
    with pytest.raises(CacheError, match="differ from their sum"):
        prune(encodings)
    check_store(open_store(tmp_path / "c"))
    prune(encodings)
    assert held(encodings) == sorted(TEXTS)


def test_a_reader_goes_on_while_its_shards_go(tmp_path: Path) -> None:
    encodings = fill(tmp_path / "c", MADE[:20], MADE[20:])
    shards = open_index(encodings).shards
    mapped = [shard.outputs(0) for shard in shards]
    was = [{name: values.copy() for name, values in one.items()} for one in mapped]
    assert prune(encodings).rewritten == 2
    assert not any(shard.path.exists() for shard in shards)
    for shard, before, copies in zip(shards, mapped, was, strict=True):
        for name, values in copies.items():
            np.testing.assert_array_equal(before[name], values)
        assert all(shard.is_whole(text) for text in range(len(shard)))


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


@pytest.mark.parametrize("kept_from_removal", ["shards", "quarantine"])
def test_what_cannot_be_removed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept_from_removal: str
) -> None:
    encodings = fill(tmp_path / "c", MADE[:20], MADE[20:])
    (encodings.folder / "quarantine").mkdir()
    (encodings.folder / "quarantine" / "a.safetensors").write_bytes(b"12345")
    unlink = Path.unlink

    def refuse(path: Path, missing_ok: bool = False) -> None:
        if path.parent.name == kept_from_removal:
            raise OSError(errno.EPERM, os.strerror(errno.EPERM))
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", refuse)
    match = rf"{kept_from_removal}/\w+\.safetensors: Operation not permitted"
    with pytest.raises(CacheError, match=match):
        prune(encodings)
    monkeypatch.undo()
    prune(encodings)
    assert held(encodings) == sorted(TEXTS)


def test_every_encoder_is_pruned_or_none(tmp_path: Path) -> None:
    first = fill(tmp_path / "c", MADE[:20], MADE[20:], name="first")
    second = fill(tmp_path / "c", MADE[1:5], name="second")
    before = listing(first)
    with pytest.raises(CacheError, match="second: holds none"):
        prune_store(open_store(tmp_path / "c"), keep=[TEXTS[30]])
    with only_keeper(second), pytest.raises(CacheError, match="another verify, prune or merge"):
        prune_store(open_store(tmp_path / "c"))
    assert listing(first) == before
    assert [one.name for one in prune_store(open_store(tmp_path / "c"))] == ["first", "second"]
    assert len(first.shard_paths()) == 1
