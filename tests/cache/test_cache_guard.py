"""What makes cached outputs wrong is refused before training; texts that vary are listed."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cached_models import fill, spec_of, tiny, tokenizer_of
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerFast, T5EncoderModel

from enginecast.cache import CachedEncoder, Variants, open_cache, require_frozen
from enginecast.cache.encoders.tokenizing import digest_of
from enginecast.cache.read.reader import EmbeddingCache
from enginecast.cache.store.spec import EncoderSpec
from enginecast.capture.sources.weights.checkpoint import sha256_of_weights
from enginecast.errors import CacheError, UsageError


@pytest.fixture
def model(tmp_path: Path) -> PreTrainedModel:
    """As a trainer loads it: fresh, and every parameter requires grad."""
    tiny(T5EncoderModel).save_pretrained(tmp_path / "t5")
    return T5EncoderModel.from_pretrained(tmp_path / "t5").eval()


@pytest.fixture
def cache(tmp_path: Path, model: PreTrainedModel) -> EmbeddingCache:
    digest, _ = sha256_of_weights(tmp_path / "t5")
    plain = spec_of(
        model, ("last_hidden_state",), tokenizer=digest_of(tokenizer_of().to_str().encode())
    )
    fields: dict[str, Any] = {one: getattr(plain, one) for one in EncoderSpec.__struct_fields__}
    spec = EncoderSpec(**{**fields, "model": {"weights": digest}})
    fill(tmp_path / "cache", model, spec)
    return open_cache(tmp_path / "cache")


def live_tokenizer() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer_of(), eos_token="</s>", pad_token="<pad>", unk_token="<unk>"
    )


def test_a_frozen_run_passes_and_says_what_was_compared(
    cache: EmbeddingCache, model: PreTrainedModel
) -> None:
    assert all(one.requires_grad for one in model.parameters())
    trained = nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(trained.parameters())
    found = require_frozen(
        CachedEncoder(cache), optimizer=[optimizer], model=model, tokenizer=live_tokenizer()
    )
    assert [one.split(":")[0] for one in found.compared] == [
        "adapters",
        "embeddings",
        "dropout",
        "weights",
        "weights",
        "optimizer",
        "optimizer",
        "tokenizer",
    ]
    assert found.skipped == ()
    assert "22 tensors of the model" in found.compared[4]
    # A pipeline's own tokenizer, which pads and cuts.
    plain = tokenizer_of()
    plain.enable_padding(length=12)
    plain.enable_truncation(3)
    assert require_frozen(cache, tokenizer=plain).compared


@pytest.mark.parametrize("cached", [nn.Linear(2, 2), "captions.cache", None])
def test_what_is_no_cache_is_refused(cached: Any) -> None:
    with pytest.raises(UsageError, match="cached: expected a CachedEncoder or what open_cache"):
        require_frozen(cached)


def resized(model: PreTrainedModel) -> None:
    model.resize_token_embeddings(99)


def with_adapter(model: PreTrainedModel) -> None:
    model.encoder.lora_a = nn.Linear(3, 3)


def in_training(model: PreTrainedModel) -> None:
    model.train()


def stepped(model: PreTrainedModel) -> None:
    with torch.no_grad():
        next(model.parameters())[4, 4] += 1e-3


def resaved(model: PreTrainedModel) -> None:
    folder = model.name_or_path
    stepped(model)
    model.save_pretrained(folder)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (resized, "has 99 embeddings, and had 96"),
        (with_adapter, r"has an adapter \(encoder\.lora_a\.weight\)"),
        (in_training, r"in training mode with a dropout of 0\.1"),
        (
            stepped,
            r"shared\.weight of the encoder is not as in .*: it was changed since it was loaded",
        ),
        (resaved, "are not those that the cache was filled with"),
    ],
)
def test_an_encoder_that_is_not_that_of_the_cache(
    cache: EmbeddingCache,
    model: PreTrainedModel,
    change: Callable[[PreTrainedModel], None],
    said: str,
) -> None:
    change(model)
    with pytest.raises(CacheError, match=said):
        require_frozen(cache, model=model)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"count": 0}, "count: expected at least 1"),
        ({"count": 2}, "do not vary without"),
        ({"dropout": 1.0}, "dropout: expected 0 <= dropout < 1"),
        ({"tag_dropout": -0.1}, "tag_dropout: expected"),
        ({"keep_first": -1}, "keep_first: expected"),
        ({"separator": ""}, "separator: expected"),
    ],
)
def test_wrong_options_of_variants(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        Variants(**options)
