"""Misses in large and in damaged caches, of other padding, and questions that are not errors."""

from pathlib import Path
from typing import Any

import pytest
from cached_models import batch_of
from test_cache_reader import TEXTS, fill, spec_of

from enginecast.cache import as_huggingface
from enginecast.cache.read import reader
from enginecast.cache.read.cached_encoder import CachedEncoder
from enginecast.cache.read.reader import EmbeddingCache, open_cache
from enginecast.cache.store.folders import Encodings
from enginecast.cache.store.index import Location
from enginecast.errors import CacheError, CacheMissError, UsageError
from enginecast.runtime.values.arrays import Array

UNKNOWN = [24, 23, 1]
"""Ids of "w v", which nobody filled."""


@pytest.fixture
def cache(tmp_path: Path) -> EmbeddingCache:
    fill(tmp_path / "cache", spec_of(), TEXTS)
    return open_cache(tmp_path / "cache")


def missed(cache: EmbeddingCache, ids: Any, mask: Any = None) -> str:
    with pytest.raises(CacheMissError) as error:
        cache.by_ids(ids, mask)
    return str(error.value)


def test_which_texts_are_missing_is_not_an_error(cache: EmbeddingCache) -> None:
    asked = [TEXTS[3], "w v", TEXTS[0], "w  v", "v"]
    assert cache.missing(asked) == ["w v", "w  v", "v"]
    assert cache.missing([]) == []
    assert TEXTS[5] in cache
    assert "w v" not in cache
    for wrong in (3, None):
        with pytest.raises(UsageError, match="text: expected a text at 0, got"):
            _ = wrong in cache
    with pytest.raises(UsageError, match="texts: expected a text at 1, got None"):
        cache.missing(["a", None])  # type: ignore[list-item]


def test_a_miss_looks_at_a_part_of_a_large_cache(
    cache: EmbeddingCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each entry that is looked at is read once, whichever causes are tried."""
    read: list[Location] = []
    ids_at = EmbeddingCache.ids_at

    def counted(self: EmbeddingCache, place: Location) -> Array:
        read.append(place)
        return ids_at(self, place)

    monkeypatch.setattr(EmbeddingCache, "ids_at", counted)
    said = missed(cache, [2, 24, 3, 4, 5, 23, 1])
    assert len(read) <= len(cache) + 2
    assert "; the one most like it is 'a b c d'" in said
    monkeypatch.setattr(reader, "LOOKED_AT", 4)
    read.clear()
    said = missed(cache, [2, 24, 3, 4, 5, 23, 1])
    assert len(read) <= 4 + 2
    assert "; of 4 that were looked at, the one most like it is 'a" in said


def test_the_same_text_is_found_among_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Although it is not among those that are looked at."""
    fill(tmp_path / "cache", spec_of(mask=False, rows="all"), TEXTS)
    cache = open_cache(tmp_path / "cache")
    monkeypatch.setattr(reader, "LOOKED_AT", 1)
    for text in TEXTS:
        with pytest.raises(CacheMissError, match="the same text is there, but padded to 12"):
            CachedEncoder(cache)(batch_of([text], 10 if len(text) < 18 else 11).ids)


def test_a_lost_tokenizer_is_named(cache: EmbeddingCache) -> None:
    file = cache.encodings.tokenizer_file
    file.unlink()
    said = missed(cache, UNKNOWN)
    assert f"3 tokens are not among its 21 entries, and why is not known: {file}: No such" in said
    with pytest.raises(CacheError, match=f"{file}: No such file"):
        cache.by_text("w v")
    with pytest.raises(CacheError, match=f"{file}: No such file"):
        cache.encodings.read_tokenizer()
    file.write_text("{")
    assert "and why is not known: tokenizer.json: not a tokenizer" in missed(cache, UNKNOWN)


def test_an_empty_cache(tmp_path: Path) -> None:
    fill(tmp_path / "cache", spec_of(), [])
    cache = open_cache(tmp_path / "cache")
    assert cache.missing(["a"]) == ["a"]
    with pytest.raises(CacheMissError, match="is not among its 0 entries: it was not filled"):
        cache.by_text("a")
    assert "makes other ids of the same text" in missed(cache, [2, 1, 3, 1])
    assert len(as_huggingface(cache)) == 0


def test_ids_that_no_tokenizer_reads(cache: EmbeddingCache) -> None:
    assert "token id 5000000000 is not among the 29" in missed(cache, [2, 5_000_000_000, 1])
    assert "token id -3 is not among the 29" in missed(cache, [2, -3, 1])


def test_no_token_is_attended_to(cache: EmbeddingCache) -> None:
    said = missed(cache, [2, 3, 1], [0, 0, 0])
    assert "none of its 3 ids is attended to: its mask is all zeros" in said


def filled_with(root: Path, **fields: Any) -> Encodings:
    return fill(root, spec_of(**fields), TEXTS)


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize("padding", [5, 1], ids=["another", "end"])
def test_padding_of_another_tokenizer(tmp_path: Path, side: str, mask: bool, padding: int) -> None:
    """The two of Stable Diffusion XL pad with "!" and with their end."""
    rows = "real" if mask else "all"
    filled_with(tmp_path / "cache", mask=mask, rows=rows, padding_side=side)
    cache = open_cache(tmp_path / "cache")
    ids = batch_of(["a b c"], 12, side=side, padding=padding).ids
    with pytest.raises(CacheMissError) as error:
        CachedEncoder(cache)(ids)
    if (side, padding) == ("left", 5):  # which is a text, too
        assert "it was not filled; the one most like it is 'a b c" in str(error.value)
        return
    assert "other ids of the same text, or other padding" in str(error.value)
    assert str(cache.encodings.tokenizer_file) in str(error.value)
