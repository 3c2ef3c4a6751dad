"""Whether a cache still says what the encoder of a training run would give.

A plain look at `requires_grad` would be wrong: every fresh model of Hugging Face has it set.  What
counts is what an optimizer holds, and whether weights, tokens and dropout are those of the fill.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import nn

from enginecast.cache.cached_encoder import CachedEncoder
from enginecast.cache.reader import EmbeddingCache
from enginecast.cache.tokenizing import parse_tokenizer, prepare_text
from enginecast.capture.checkpoint import find_weight_files, read_weights, sha256_of_weights
from enginecast.errors import CacheError

_SAMPLES = 64
"""Cached texts that a tokenizer is tried on."""
_ADAPTERS = ("peft_config", "_hf_peft_config_loaded")
_RELOAD = "Load the encoder itself where it is trained; its outputs cannot be cached then."


@dataclass(frozen=True)
class Frozen:
    """What `require_frozen` looked at.

    Args:
        compared: what was found as it was when the cache was filled.
        skipped: what could not be compared, each with the reason.
    """

    compared: tuple[str, ...]
    skipped: tuple[str, ...]


class _Look:
    def __init__(self, cache: EmbeddingCache) -> None:
        self.cache = cache
        self.compared: list[str] = []
        self.skipped: list[str] = []

    def refuse(self, what: str, hint: str = _RELOAD) -> CacheError:
        return CacheError(f"{self.cache.path}: {what}", hint=hint)


def require_frozen(
    cached: CachedEncoder | EmbeddingCache,
    *,
    optimizer: Any = None,
    model: nn.Module | None = None,
    tokenizer: Any = None,
) -> Frozen:
    """Refuse what makes cached outputs wrong; call it once before training.

    Args:
        cached: the drop-in, or the cache.
        optimizer: one, or several in a list; those of wrappers that have `param_groups`, too.
        model: the encoder itself, where the trainer still has it.
        tokenizer: of `transformers` or `tokenizers`, that the trainer uses.

    Returns:
        What was compared, and what could not be, with the reasons.

    Raises:
        CacheError: parameters of the encoder are in an optimizer; it has adapters, resized
            embeddings, other weights than the cache's, or dropout in training mode; the tokenizer
            makes other ids.
    """
    look = _Look(cached.cache if isinstance(cached, CachedEncoder) else cached)
    if model is not None:
        _check_adapters(look, model)
        _check_vocabulary(look, model)
        _check_dropout(look, model)
        _check_weights(look, model)
    if optimizer is not None:
        _check_optimizer(look, optimizer, model)
    if tokenizer is not None:
        _check_tokenizer(look, tokenizer)
    return Frozen(tuple(look.compared), tuple(look.skipped))


def _check_optimizer(look: _Look, optimizer: Any, model: nn.Module | None) -> None:
    if model is None:
        look.skipped.append("optimizer: its parameters have no names; give the encoder as `model`")
        return
    optimizers = optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]
    held = {
        id(one) for each in optimizers for group in each.param_groups for one in group["params"]
    }
    trained = [name for name, parameter in model.named_parameters() if id(parameter) in held]
    if trained:
        raise look.refuse(
            f"{len(trained)} parameters of the encoder are in the optimizer, first {trained[0]}: "
            "after one step the cached outputs are those of another encoder"
        )
    look.compared.append("optimizer: it holds no parameter of the encoder")


def _check_adapters(look: _Look, model: nn.Module) -> None:
    named = next((name for name in _ADAPTERS if getattr(model, name, None)), None)
    lora = next((name for name, _ in model.named_parameters() if "lora_" in name), None)
    if named or lora:
        raise look.refuse(
            f"the encoder has an adapter ({lora or named}), which the cached outputs do not have",
            "Merge it into the weights, save them and fill a cache from those.",
        )
    look.compared.append("adapters: none")


def _check_vocabulary(look: _Look, model: nn.Module) -> None:
    config = look.cache.about.config
    wanted = config.get("vocab_size", config.get("text_config", {}).get("vocab_size"))
    embeddings = getattr(model, "get_input_embeddings", lambda: None)()
    size = getattr(embeddings, "num_embeddings", None)
    if wanted is None or size is None:
        look.skipped.append("embeddings: their number is not in the cache, or not in the model")
        return
    if size != wanted:
        raise look.refuse(
            f"the encoder has {size} embeddings, and had {wanted} when the cache was filled: they "
            "were resized",
            "Save the resized encoder and its tokenizer, and fill a cache from those.",
        )
    look.compared.append(f"embeddings: {size}")


def _check_dropout(look: _Look, model: nn.Module) -> None:
    for name, module in model.named_modules():
        rate = _dropout(module)
        if module.training and rate:
            raise look.refuse(
                f"the encoder is in training mode with a dropout of {rate:g} ({name or 'itself'}); "
                "the cache was filled without dropout",
                "Call encoder.eval() if it is to be frozen; with dropout nothing can be cached.",
            )
    look.compared.append("dropout: none, or not in training mode")


def _dropout(module: nn.Module) -> float:
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return module.p
    rate = getattr(module, "dropout", 0.0)  # of attention that drops out by a function
    return rate if isinstance(rate, float) else 0.0


def _check_weights(look: _Look, model: nn.Module) -> None:
    """Compare the folder that the model was loaded from with the spec, and the model with it."""
    wanted = look.cache.spec.model.get("weights")
    path = getattr(model, "name_or_path", "")
    folder = Path(path) if path else None
    if wanted is None:
        look.skipped.append("weights: the cache was filled with random ones")
        return
    if folder is None or not folder.is_dir() or not find_weight_files(folder):
        look.skipped.append("weights: the model was not loaded from a folder that is still there")
        return
    found, _ = sha256_of_weights(folder)
    if found != wanted:
        raise look.refuse(
            f"the weights in {folder} are not those that the cache was filled with (sha256 {wanted}"
            f", got {found})",
            "Load the encoder of the cache, or fill a cache from this one.",
        )
    look.compared.append(f"weights: those in {folder}")
    state = model.state_dict()
    stored = {name: one for name, one in read_weights(folder).items() if name in state}
    for name, tensor in stored.items():
        now = state[name].detach().cpu()
        if now.shape != tensor.shape or not torch.equal(now, tensor.to(now.dtype)):
            raise look.refuse(f"{name} of the encoder was changed since it was loaded")
    look.compared.append(f"weights: {len(stored)} tensors of the model, each as in the folder")


def _check_tokenizer(look: _Look, tokenizer: Any) -> None:
    """Compare vocabularies, and the ids of some cached texts: those are what counts."""
    cache = look.cache
    ours = parse_tokenizer(cache.encodings.tokenizer_file.read_bytes()).get_vocab()
    added = sorted(set(tokenizer.get_vocab()) - set(ours))
    if added:
        raise look.refuse(
            f"the tokenizer has {len(added)} tokens that the cache's has not, first {added[0]!r}",
            "Texts with new tokens cannot be cached: use the tokenizer that the cache was filled "
            f"with, {cache.encodings.tokenizer_file}.",
        )
    if isinstance(tokenizer, Tokenizer):  # it may be told to pad or to cut
        tokenizer = parse_tokenizer(tokenizer.to_str().encode())
        tokenizer.no_padding()
        tokenizer.no_truncation()
    for number in range(0, len(cache), max(1, len(cache) // _SAMPLES)):
        entry = cache.by_row(number)
        ids = _ids(tokenizer, prepare_text(cache.spec, entry.text))
        if len(ids) <= cache.spec.max_length and not np.array_equal(ids, entry.ids):
            raise look.refuse(
                f"the tokenizer makes {ids[:8]}... of {entry.text[:60]!r}, and the cache's made "
                f"{entry.ids[:8].tolist()}...",
                f"Use the tokenizer of the cache: {cache.encodings.tokenizer_file}.",
            )
    look.compared.append("tokenizer: no new tokens, and the same ids of cached texts")


def _ids(tokenizer: Any, text: str) -> list[int]:
    if isinstance(tokenizer, Tokenizer):
        return list(tokenizer.encode(text).ids)
    return [int(one) for one in tokenizer(text)["input_ids"]]
