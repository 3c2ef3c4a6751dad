"""The guard compares every tensor of a loaded encoder, whatever its names are in the file."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cached_models import fill, spec_of, tiny
from transformers import (
    CLIPTextModel,
    CLIPTextModelWithProjection,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    PreTrainedModel,
    T5EncoderModel,
)

from enginecast.cache import open_cache, require_frozen
from enginecast.cache.read.reader import EmbeddingCache
from enginecast.cache.store.spec import EncoderSpec
from enginecast.capture.sources.weights.checkpoint import sha256_of_weights
from enginecast.errors import CacheError


def cache_of(root: Path, model: PreTrainedModel, weights: dict[str, str]) -> EmbeddingCache:
    """A cache whose spec names these weights."""
    clip = isinstance(model, (CLIPTextModel, CLIPTextModelWithProjection))
    options = {"mask": False, "rows": "all"} if clip else {}
    plain = spec_of(model, ("last_hidden_state",), **options)
    fields: dict[str, Any] = {one: getattr(plain, one) for one in EncoderSpec.__struct_fields__}
    fill(root, model, EncoderSpec(**{**fields, "model": weights}), ["a"])
    return open_cache(root)


def cache_from(root: Path, model: PreTrainedModel, folder: Path) -> EmbeddingCache:
    return cache_of(root, model, {"weights": sha256_of_weights(folder)[0]})


def llama() -> PreTrainedModel:
    torch.manual_seed(2)
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        pad_token_id=0,
        bos_token_id=27,
        eos_token_id=1,
    )
    return LlamaForCausalLM(config).eval()


@pytest.mark.parametrize(
    ("saved", "kind"),
    [
        (lambda: tiny(CLIPTextModel), CLIPTextModel),
        (lambda: tiny(CLIPTextModelWithProjection), CLIPTextModelWithProjection),
        (lambda: tiny(CLIPTextModelWithProjection), CLIPTextModel),
        (lambda: tiny(T5EncoderModel), T5EncoderModel),
        (llama, LlamaModel),
    ],
    ids=["clip", "projection", "clip-of-projection", "t5", "llama-of-causal"],
)
def test_any_tensor_that_was_changed_is_found(
    tmp_path: Path, saved: Callable[[], PreTrainedModel], kind: type[PreTrainedModel]
) -> None:
    saved().save_pretrained(tmp_path / "model")
    model = kind.from_pretrained(tmp_path / "model").eval()
    cache = cache_from(tmp_path / "cache", model, tmp_path / "model")
    found = require_frozen(cache, model=model)
    assert found.skipped == ()
    count = len(model.state_dict())
    assert count > 1
    assert f"weights: {count} tensors of the model" in found.compared[-1]
    parameters = list(model.named_parameters())
    for name, parameter in (parameters[0], parameters[-1]):
        kept = parameter.detach().clone()
        parameter.detach().flatten()[-1] += 0.5
        with pytest.raises(CacheError, match=rf": {name} of the encoder is not as in"):
            require_frozen(cache, model=model)
        parameter.detach().copy_(kept)
