"""Whether a cache still says what the encoder of a training run would give.

A plain look at `requires_grad` would be wrong: every fresh model of Hugging Face has it set.  What
counts is what an optimizer holds, and whether weights, tokens and dropout are those of the fill.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from tokenizers import Tokenizer
from torch import nn

from enginecast.cache.cached_encoder import CachedEncoder
from enginecast.cache.guard_weights import compare_weights
from enginecast.cache.reader import EmbeddingCache
from enginecast.cache.tokenizing import parse_tokenizer, prepare_text
from enginecast.errors import CacheError, UsageError

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
        optimizer: one, or several in a list, dictionary or other iterable; those of wrappers that
            have `param_groups`, too.  Without `model` only parameters of a `CachedEncoder` can be
            found in it.
        model: the encoder itself, where the trainer still has it.
        tokenizer: of `transformers` or `tokenizers`, that the trainer uses.

    Returns:
        What was compared, and what could not be, with the reasons.

    Raises:
        CacheError: parameters of the encoder are in an optimizer; it has adapters, resized
            embeddings, other weights than the cache's, or dropout in training mode; the tokenizer
            makes other ids.
        UsageError: what is given as optimizer is none.
    """
    look = _Look(cached.cache if isinstance(cached, CachedEncoder) else cached)
    if model is not None:
        _check_adapters(look, model)
        _check_vocabulary(look, model)
        _check_dropout(look, model)
        _check_weights(look, model)
    held = None if optimizer is None else _held_by(optimizer)
    if isinstance(cached, CachedEncoder):
        _check_cached(look, cached, held)
    if held is not None:
        _check_optimizer(look, held, model)
    if tokenizer is not None:
        _check_tokenizer(look, tokenizer)
    return Frozen(tuple(look.compared), tuple(look.skipped))


def _check_cached(look: _Look, cached: CachedEncoder, held: set[int] | None) -> None:
    """Its parameters have no elements: an optimizer of them would train nothing."""
    for name, parameter in cached.named_parameters():
        if parameter.requires_grad or id(parameter) in (held or ()):
            what = "is in the optimizer" if id(parameter) in (held or ()) else "requires grad"
            raise look.refuse(
                f"{name} of the CachedEncoder {what}, but it has no weights that could be trained",
                "Leave the encoder out of what is trained; or load the encoder itself.",
            )
    if held is not None:
        look.compared.append("optimizer: it holds nothing of the CachedEncoder")


def _check_optimizer(look: _Look, held: set[int], model: nn.Module | None) -> None:
    if model is None:
        look.skipped.append(
            "optimizer: whether it holds parameters of the encoder itself; give that as `model`"
        )
        return
    trained = [name for name, parameter in model.named_parameters() if id(parameter) in held]
    if trained:
        raise look.refuse(
            f"{len(trained)} parameters of the encoder are in the optimizer, first {trained[0]}: "
            "after one step the cached outputs are those of another encoder"
        )
    look.compared.append("optimizer: it holds no parameter of the encoder")


def _held_by(optimizer: Any) -> set[int]:
    """Ids of the parameters of an optimizer, or of any collection of them."""
    if hasattr(optimizer, "param_groups"):
        return {id(one) for group in optimizer.param_groups for one in group["params"]}
    if isinstance(optimizer, Mapping):
        optimizer = optimizer.values()
    if not isinstance(optimizer, Iterable):
        raise UsageError(
            f"optimizer: expected one with param_groups, or several, got a "
            f"{type(optimizer).__name__}"
        )
    return set().union(*(_held_by(one) for one in optimizer))


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
    name = look.cache.encodings.folder.name
    try:
        found = compare_weights(look.cache.spec, name, model)
    except CacheError as error:
        raise look.refuse(error.message, error.hint) from error
    look.compared.extend(found.compared)
    look.skipped.extend(found.skipped)


def _check_tokenizer(look: _Look, tokenizer: Any) -> None:
    """Compare vocabularies, and the ids of some cached texts: those are what counts."""
    cache = look.cache
    ours = parse_tokenizer(_tokenizer_json(cache)).get_vocab()
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


def _tokenizer_json(cache: EmbeddingCache) -> bytes:
    file = cache.encodings.tokenizer_file
    try:
        return file.read_bytes()
    except OSError as error:
        raise CacheError(
            f"{file} cannot be read: {error.strerror}",
            hint="Put the tokenizer.json back that the cache was filled with.",
        ) from error
