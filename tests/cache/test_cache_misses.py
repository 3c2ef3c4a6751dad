"""A text that is not there: the error names the nearest cause, and the way out."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cached_models import (
    TEXTS,
    Batch,
    batch_of,
    fill,
    spec_of,
    tiny,
    tokenizer_of,
)
from exports import Exports, cast
from transformers import PreTrainedModel, T5EncoderModel

from enginecast.cache.encoders.tokenizing import digest_of
from enginecast.cache.read.cached_encoder import CachedEncoder
from enginecast.cache.read.reader import EmbeddingCache, open_cache
from enginecast.cache.store.records import Failure, record
from enginecast.cache.store.spec import pad_rows
from enginecast.errors import CacheMissError

TOKENIZER = digest_of(tokenizer_of().to_str().encode())


@pytest.fixture(scope="module")
def t5() -> PreTrainedModel:
    return tiny(T5EncoderModel)


@pytest.fixture
def filled(t5: PreTrainedModel, tmp_path: Path) -> Callable[..., EmbeddingCache]:
    def make(texts: Any = TEXTS, **fields: Any) -> EmbeddingCache:
        spec = spec_of(t5, ("last_hidden_state",), tokenizer=TOKENIZER, **fields)
        fill(tmp_path / "cache", t5, spec, texts)
        return open_cache(tmp_path / "cache")

    return make


Filled = Callable[..., EmbeddingCache]


def missed(cache: EmbeddingCache, ids: Any, mask: Any = None) -> str:
    """The error of a call as a pipeline makes it."""
    with pytest.raises(CacheMissError) as error:
        CachedEncoder(cache)(torch.as_tensor(ids), mask)
    text = str(error.value)
    assert str(cache.path) in text
    assert f"{len(cache)} entries" in text
    return text


def one(text: str, length: int | None = None) -> Batch:
    return batch_of([text], length)


def test_a_text_that_failed_says_why(filled: Filled) -> None:
    cache = filled()
    key = cache.keys.of_tokens(one("x y").ids[0].numpy())
    record(cache.encodings, [Failure("x y", 3, "7 values are not finite", key)])
    assert "failed when the cache was filled: 7 values are not finite" in missed(
        cache, one("x y").ids
    )


def test_a_text_that_was_cut_here(filled: Filled) -> None:
    said = missed(filled(), one("a b c d e f g h", 6).ids)
    assert "it is how 'a b c d e f g h' (9 tokens) begins, as if it was cut at 6 tokens" in said
    assert "max_length=12" in said


@pytest.mark.parametrize("name", ["words-t5", "words-clip"])
@pytest.mark.parametrize("mask", ["--mask", "--no-mask"])
def test_word_pieces_and_an_end_that_pads(
    exports: Exports, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, mask: str
) -> None:
    """Word pieces come back as other ids even of cached texts; CLIP's end token is its padding."""
    folder = exports.model(name)
    (tmp_path / "texts.txt").write_text("a red fox\na white dog\n")
    options = ("--prompts", tmp_path / "texts.txt", "-o", tmp_path / "cache", "--quiet", mask)
    assert cast(capsys, "cache", "fill", folder, *options).code == 0
    cache = open_cache(tmp_path / "cache")
    tokens = cache.tokenizing.tokens(["a red dog at night"])[0].ids
    row = pad_rows(cache.spec, [tokens], cache.spec.max_length)[0]
    bits = (np.arange(row.shape[1]) < len(tokens))[None].astype(int)
    masked = torch.from_numpy(bits) if cache.spec.mask else None
    assert "it was not filled; the one most like it is 'a " in missed(cache, row, masked)
    if cache.spec.mask:
        assert f"{row.shape[1] - len(tokens)} of its ids are padding" in missed(cache, row)


def test_a_text_that_nobody_filled(filled: Filled) -> None:
    cache = filled()
    with pytest.raises(CacheMissError) as error:
        cache.by_text("t y u i q")
    said = str(error.value)
    assert "'t y u i q' (6 tokens) is not among its 6 entries: it was not filled" in said
    assert "the one most like it is 'q w e r t y' (7 tokens)" in said
    assert "cache fill ENCODER --prompts FILE" in said
    assert "enginecast.cache.Variants" in said
