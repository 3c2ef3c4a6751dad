"""Checking a cache: every flipped bit is found, taken out, and costs no whole entry."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from cache_entries import (
    POOLED,
    SPEC,
    byte_of,
    entries,
    fill,
    flip,
    held,
    texts,
)
from cache_shards import open_folder, read_only

from enginecast.cache.store.folders import Encodings, open_store
from enginecast.cache.store.shard import Entry, open_shard, shard_name, write_shard
from enginecast.cache.upkeep.checking import Checked, check_store
from enginecast.cache.upkeep.pruning import prune_store

TEXTS = texts(12)


@pytest.fixture
def encodings(tmp_path: Path) -> Encodings:
    made = entries(TEXTS)
    return fill(tmp_path / "cache", made[:6], made[6:])


def check(encodings: Encodings) -> Checked:
    (checked,) = check_store(open_store(encodings.folder.parent))
    return checked


@pytest.mark.parametrize("tensor", ["rows.last_hidden_state", "text.pooler_output"])
def test_a_flipped_bit_in_the_outputs_costs_one_text(encodings: Encodings, tensor: str) -> None:
    path = encodings.shard_paths()[0]
    lost = open_shard(path, SPEC).text(0)
    flip(path, byte_of(path, tensor))

    (damage,) = check(encodings).damages
    assert damage.file == f"text_encoder/shards/{path.name}"
    assert damage.problem == "outputs differ from their sum"
    assert (damage.salvaged, damage.lost) == (5, (lost,))
    assert held(encodings) == sorted(set(TEXTS) - {lost})
    quarantined = encodings.folder / "quarantine" / path.name
    assert damage.quarantine == f"text_encoder/quarantine/{path.name}"
    note = json.loads(quarantined.with_suffix(".json").read_text(encoding="utf-8"))
    assert (note["problem"], note["lost"]) == (damage.problem, [lost])

    assert check(encodings).damages == ()
    encodings.commit(entries([lost]))  # as a fill would
    assert held(encodings) == sorted(TEXTS)


@pytest.mark.parametrize(
    ("place", "problem"),
    [
        ("keys", "its index differs from its digest"),
        ("ids", "its index differs from its digest"),
        ("sums", "its index differs from its digest"),
        ("header", "it cannot be read as a shard"),
    ],
)
def test_a_flipped_bit_elsewhere_costs_the_shard(
    encodings: Encodings, place: str, problem: str
) -> None:
    path, other = encodings.shard_paths()
    lost = [open_shard(path, SPEC).text(text) for text in range(6)]
    flip(path, 9 if place == "header" else byte_of(path, place))

    (damage,) = check(encodings).damages
    assert problem in damage.problem
    assert damage.salvaged == 0
    assert damage.lost == (tuple(lost) if place != "header" else ())
    assert encodings.shard_paths() == [other]
    assert check(encodings).damages == ()


@pytest.mark.parametrize("size", [0, 7, 100, -1])
def test_a_cut_shard_is_taken_out(encodings: Encodings, size: int) -> None:
    path, other = encodings.shard_paths()
    path.write_bytes(path.read_bytes()[:size])
    (damage,) = check(encodings).damages
    assert damage.quarantine == f"text_encoder/quarantine/{path.name}"
    assert encodings.shard_paths() == [other]


def broken(kind: str) -> Entry:
    """An entry that a writer got wrong: its sum and digest are right."""
    (made,) = entries(["w1 w2 w3"])
    if kind == "key":
        return Entry(b"k" * 16, made.text, made.ids, made.outputs)
    outputs = dict(made.outputs)
    if kind == "rows":
        outputs["last_hidden_state"] = outputs["last_hidden_state"][:-1]
    else:
        outputs[POOLED.name] = np.array([0.0, np.nan, 1.0], np.float32)
    return Entry(made.key, made.text, made.ids, outputs)


@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        ("key", "a key is not the hash of its token ids"),
        ("rows", "a text has another number of rows than its spec says"),
        ("finite", "outputs are not finite"),
    ],
)
def test_entries_that_were_written_wrong_are_found(
    encodings: Encodings, kind: str, problem: str
) -> None:
    good = entries(["w4 w5", "w6"])
    made = [*good, broken(kind)]
    name = shard_name([entry.key for entry in made])
    write_shard(encodings.shard_folder / name, SPEC, made)

    (damage,) = check(encodings).damages
    assert damage.problem == problem
    assert (damage.salvaged, damage.lost) == (2, ("w1 w2 w3",))
    assert held(encodings) == sorted([*TEXTS, "w4 w5", "w6"])


@pytest.mark.parametrize("tensor", ["text.pooler_output", "keys"])
def test_damage_is_reported_where_nothing_can_be_written(tensor: str) -> None:
    with open_folder() as folder:
        encodings = fill(folder / "cache", entries(TEXTS[:6]), entries(TEXTS[6:]))
        path = encodings.shard_paths()[0]
        flip(path, byte_of(path, tensor))
        before = sorted(folder.rglob("*"))
        with read_only(folder):
            (damage,) = check(encodings).damages
        assert damage.file == f"text_encoder/shards/{path.name}"
        assert "digest" in damage.problem or "sum" in damage.problem
        assert (damage.salvaged, damage.quarantine) == (0, None)
        assert damage.stays.endswith("Permission denied")
        assert "cache verify" in damage.hint
        assert sorted(folder.rglob("*")) == before
        (damage,) = check(encodings).damages
        assert (damage.stays, damage.quarantine) == ("", f"text_encoder/quarantine/{path.name}")


WRITER = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from cache_entries import entries, texts
from enginecast.cache.store.folders import open_store
encodings = open_store(sys.argv[1]).encodings()
made = entries(texts(240))
for begin in range(0, 240, 4):
    if begin == 120:
        sys.stdin.readline()  # on a busy machine all would be written before it is looked at
    encodings.commit(made[begin : begin + 4])
"""


def test_checks_and_prunes_leave_a_fill_alone(tmp_path: Path) -> None:
    encodings = fill(tmp_path / "cache", entries(texts(4)))
    command = [sys.executable, "-c", WRITER, str(tmp_path / "cache"), str(Path(__file__).parent)]
    rounds, store = 0, open_store(tmp_path / "cache")
    with subprocess.Popen(command, stdin=subprocess.PIPE) as writer:
        assert writer.stdin is not None
        while writer.poll() is None:
            assert check(encodings).damages == ()
            prune_store(store, shard_bytes=3000)
            rounds += len(encodings.shard_paths()) > 2
            if rounds == 2 and not writer.stdin.closed:
                writer.stdin.close()
    assert (writer.returncode, rounds > 2) == (0, True)
    assert check(encodings).damages == ()
    prune_store(store)
    assert held(encodings) == sorted(texts(240))
