"""What a cache is said to hold, counted by hand."""

from pathlib import Path

from cache_entries import ABOUT, SPEC, TOKENIZER, byte_of, entries, fill, flip, texts

from enginecast.cache.store.folders import open_store
from enginecast.cache.store.records import Failure, Truncation, record
from enginecast.cache.store.spec import fingerprint
from enginecast.cache.upkeep.census import Census, census_of
from enginecast.cache.upkeep.checking import check_store

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
