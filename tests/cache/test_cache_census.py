"""What a cache is said to hold, counted by hand."""

from pathlib import Path

import pytest
from cache_entries import ABOUT, SPEC, TOKENIZER, byte_of, entries, fill, flip, spec_with, texts

from enginecast.cache.store.folders import Encodings, create_store, open_store
from enginecast.cache.store.index import Index, open_index
from enginecast.cache.store.records import Failure, Truncation, record
from enginecast.cache.store.spec import fingerprint
from enginecast.cache.upkeep import census as counting
from enginecast.cache.upkeep.census import Census, census_of
from enginecast.cache.upkeep.checking import check_store
from enginecast.errors import CacheError

TEXTS = texts(20)
MADE = entries(TEXTS)


def census(root: Path) -> Census:
    (found,) = census_of(open_store(root))
    return found


def test_everything_is_counted(tmp_path: Path) -> None:
    encodings = fill(tmp_path / "c", MADE[:12], MADE[10:])
    lengths = sorted(len(TOKENIZER.encode(text).ids) for text in TEXTS)
    assert census(tmp_path / "c") == Census(
        name="text_encoder",
        fingerprint=fingerprint(SPEC),
        about=ABOUT,
        spec=SPEC,
        texts=20,
        tokens=(1, (lengths[9] + lengths[10]) / 2, 8),
        rows=sum(lengths),
        bytes=sum(path.stat().st_size for path in encodings.shard_paths()),
        padded_bytes=20 * (8 * 5 + 3) * 4,
        shards=2,
        doubles=2,
        failed={},
        truncated=0,
        leftovers=0,
        leftover_bytes=0,
        quarantined=0,
        quarantined_bytes=0,
        damaged=(),
    )


def test_rows_are_those_that_are_stored(tmp_path: Path) -> None:
    spec = spec_with(rows="all", max_length=10, skip_rows=2)
    fill(tmp_path / "c", entries(TEXTS, spec), spec=spec)
    assert census(tmp_path / "c").rows == 20 * 8


def test_what_went_wrong_is_counted(tmp_path: Path) -> None:
    encodings = fill(tmp_path / "c", MADE[:10], MADE[10:])
    record(
        encodings,
        [Failure(f"w1 {number}", 3, "not finite", bytes([number]) * 16) for number in range(3)]
        + [Failure("w5", 2, "refused", b"r" * 16), Failure(TEXTS[0], 1, "old", MADE[0].key)],
    )
    record(encodings, [Truncation("w1 " * 30, 31, MADE[1].key)])
    left = encodings.staging_folder / "dead"
    left.mkdir()
    (left / "part").write_bytes(b"123")
    found = census(tmp_path / "c")
    assert found.failed == {"not finite": 3, "refused": 1}
    assert (found.truncated, found.leftovers, found.leftover_bytes) == (1, 1, 3)

    path = encodings.shard_paths()[0]
    flip(path, byte_of(path, "keys"))
    found = census(tmp_path / "c")
    assert found.texts == 10
    assert [problem.startswith(f"{path}: damaged") for problem in found.damaged] == [True]
    check_store(open_store(tmp_path / "c"))
    found = census(tmp_path / "c")
    quarantine = list((encodings.folder / "quarantine").iterdir())
    assert (found.quarantined, found.damaged) == (1, ())
    assert found.quarantined_bytes == sum(file.stat().st_size for file in quarantine)


@pytest.mark.parametrize("last", [False, True])
def test_shards_that_are_joined_meanwhile_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last: bool
) -> None:
    encodings = fill(tmp_path / "c", *(MADE[at : at + 5] for at in range(0, 20, 5)))

    def open_then_join(encodings: Encodings, *, keep: bool) -> Index:
        index = open_index(encodings, keep=keep)
        if last or len(index.shards) > 1:
            joined = MADE[:19] if len(index.shards[0]) == 20 else MADE
            for path in encodings.shard_paths():
                path.unlink()
            encodings.commit(joined)
        return index

    monkeypatch.setattr(counting, "open_index", open_then_join)
    if last:  # it never ends
        with pytest.raises(CacheError, match="the shard no longer exists"):
            census(tmp_path / "c")
        return
    found = census(tmp_path / "c")
    assert (found.shards, found.texts) == (1, 20)
    assert found.bytes == sum(path.stat().st_size for path in encodings.shard_paths())


def test_caches_with_nothing_and_with_several_encoders(tmp_path: Path) -> None:
    assert census_of(create_store(tmp_path / "c")) == []
    fill(tmp_path / "c")
    fill(tmp_path / "c", MADE, name="second")
    first, second = census_of(open_store(tmp_path / "c"))
    assert (first.name, first.texts, first.tokens) == ("second", 20, (1, 5.0, 8))
    assert (second.name, second.texts, second.tokens) == ("text_encoder", 0, None)
    assert [one.name for one in census_of(open_store(tmp_path / "c"), "second")] == ["second"]
