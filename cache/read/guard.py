"""Whether a cache still says what the encoder of a training run would give.

A plain look at `requires_grad` would be wrong: every fresh model of Hugging Face has it set.  What
counts is what an optimizer holds, and whether weights, tokens and dropout are those of the fill.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import nn
from transformers import PreTrainedModel

from enginecast.cache.encoders.tokenizing import parse_tokenizer
from enginecast.cache.read.cached_encoder import CachedEncoder
from enginecast.cache.read.reader import EmbeddingCache
from enginecast.capture.python.quiet import quiet_transformers
from enginecast.capture.sources.weights.checkpoint import (
    Checkpoint,
    find_weight_files,
    name_weights,
    read_stored,
    sha256_of_weights,
)
from enginecast.errors import CacheError, SourceError, UsageError
from enginecast.runtime.text_form import prepare_text

_SAMPLES = 64
"""Cached texts that a tokenizer is tried on."""
_ADAPTERS = ("peft_config", "_hf_peft_config_loaded")
_RELOAD = "Load the encoder itself where it is trained; its outputs cannot be cached then."


@dataclass(frozen=True)
class Frozen:
    """What `require_frozen` looked at."""

    compared: tuple[str, ...]
    """What was found as it was when the cache was filled."""
    skipped: tuple[str, ...]
    """What could not be compared, each with the reason."""


@dataclass
class _Look:
    cache: EmbeddingCache
    compared: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)

    def refuse(self, what: str, hint: str = _RELOAD) -> CacheError:
        return CacheError(f"{self.cache.path}: {what}", hint=hint)


def require_frozen(
    cached: CachedEncoder | EmbeddingCache,
    *,
    optimizer: Any = None,
    model: nn.Module | None = None,
    tokenizer: Any = None,
) -> Frozen:
    """Check that cached outputs are right for a training run; call it once before training.

    Args:
        cached: the drop-in, or the cache.
        optimizer: an optimizer, a wrapper that has `param_groups`, or several of them in a list,
            dictionary or other iterable.  Without `model`, only the parameters of a
            `CachedEncoder` can be found in it.
        model: the encoder itself, if the trainer still has it.
        tokenizer: the trainer's tokenizer, of `transformers` or `tokenizers`.

    Returns:
        What was compared, and what could not be, with the reasons.

    Raises:
        CacheError: an optimizer has parameters of the encoder; the encoder has adapters, resized
            embeddings, other weights than the cache's, or dropout in training mode; or the
            tokenizer makes other ids.
        UsageError: `cached` is no cache, or `optimizer` is not an optimizer.

    Examples:
        >>> import torch
        >>> from enginecast.cache import CachedEncoder, require_frozen
        >>> head = torch.nn.Linear(8, 2)
        >>> cached = CachedEncoder("captions.cache")
        >>> require_frozen(cached, optimizer=torch.optim.SGD(head.parameters())).compared
        ('optimizer: it holds nothing of the CachedEncoder',)
    """
    cache = cached.cache if isinstance(cached, CachedEncoder) else cached
    if not isinstance(cache, EmbeddingCache):
        raise UsageError(
            "require_frozen: cached: expected a CachedEncoder or what open_cache returns, got a"
            f" {type(cached).__name__}",
            hint="The encoder itself goes to `model`; a path to open_cache.",
        )
    look = _Look(cache)
    if model is not None:
        named = next((name for name in _ADAPTERS if getattr(model, name, None)), None)
        lora = next((name for name, _ in model.named_parameters() if "lora_" in name), None)
        if named or lora:
            raise look.refuse(
                f"the encoder has an adapter ({lora or named}), which the cached outputs do not"
                " have",
                "Merge it into the weights, save them and fill a cache from those.",
            )
        look.compared.append("adapters: none")
        _check_vocabulary(look, model)
        _check_dropout(look, model)
        _check_weights(look, model)
    held = None if optimizer is None else _held_by(optimizer)
    if isinstance(cached, CachedEncoder):
        # Its parameters have no elements: an optimizer of them would train nothing.
        for name, parameter in cached.named_parameters():
            trained = id(parameter) in (held or ())
            if trained or parameter.requires_grad:
                what = "is in the optimizer" if trained else "requires grad"
                raise look.refuse(
                    f"{name} of the CachedEncoder {what}, but it has no weights that could be"
                    " trained",
                    "Leave the encoder out of what is trained; or load the encoder itself.",
                )
        if held is not None:
            look.compared.append("optimizer: it holds nothing of the CachedEncoder")
    if held is not None and model is not None:
        names = [name for name, parameter in model.named_parameters() if id(parameter) in held]
        if names:
            raise look.refuse(
                f"{len(names)} parameters of the encoder are in the optimizer, first {names[0]}: "
                "after one step the cached outputs are those of another encoder"
            )
        look.compared.append("optimizer: it holds no parameter of the encoder")
    elif held is not None:
        look.skipped.append(
            "optimizer: whether it holds parameters of the encoder itself; give that as `model`"
        )
    if tokenizer is not None:
        _check_tokenizer(look, tokenizer)
    return Frozen(tuple(look.compared), tuple(look.skipped))


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
        rate = getattr(module, "dropout", 0.0)  # of attention that drops out by a function
        if isinstance(module, nn.modules.dropout._DropoutNd):
            rate = float(module.p)
        if module.training and isinstance(rate, float) and rate:
            raise look.refuse(
                f"the encoder is in training mode with a dropout of {rate:g} ({name or 'itself'}); "
                "the cache was filled without dropout",
                "Call encoder.eval() if it is to be frozen; with dropout nothing can be cached.",
            )
    look.compared.append("dropout: none, or not in training mode")


def _check_tokenizer(look: _Look, tokenizer: Any) -> None:
    """Compare vocabularies, and the ids of some cached texts: those are what counts."""
    cache = look.cache
    ours = parse_tokenizer(cache.encodings.read_tokenizer()).get_vocab()
    added = sorted(set(tokenizer.get_vocab()) - set(ours))
    if added:
        raise look.refuse(
            f"the tokenizer has {len(added)} tokens that the cache's has not, first {added[0]!r}",
            "Texts with new tokens cannot be cached: use the tokenizer that the cache was filled "
            f"with, {cache.encodings.tokenizer_file}.",
        )
    if isinstance(tokenizer, Tokenizer):  # it may be set to pad or to cut
        tokenizer = parse_tokenizer(tokenizer.to_str().encode())
        tokenizer.no_padding()
        tokenizer.no_truncation()
    for number in range(0, len(cache), max(1, len(cache) // _SAMPLES)):
        entry = cache.by_row(number)
        text, end = prepare_text(cache.spec, entry.text)
        texts = [text, end] if cache.spec.keep_end else [text]
        of_rust = isinstance(tokenizer, Tokenizer)
        call: Any = tokenizer.encode if of_rust else tokenizer
        made = [call(text, add_special_tokens=cache.spec.special_tokens) for text in texts]
        ids = [n for one in made for n in (one.ids if of_rust else one["input_ids"])]
        if len(ids) <= cache.spec.max_length and not np.array_equal(ids, entry.ids):
            raise look.refuse(
                f"the tokenizer makes {ids[:8]}... of {entry.text[:60]!r}, and the cache's made "
                f"{entry.ids[:8].tolist()}...",
                f"Use the tokenizer of the cache: {cache.encodings.tokenizer_file}.",
            )
    look.compared.append("tokenizer: no new tokens, and the same ids of cached texts")


def _check_weights(look: _Look, model: nn.Module) -> None:
    """Compare the folder that a model was loaded from with the spec, and the model with it."""
    spec = look.cache.spec
    wanted, root = spec.model.get("weights"), Path(getattr(model, "name_or_path", ""))
    if wanted is None or "factory" in spec.model:
        look.skipped.append("weights: the cache was not filled from a folder of weights")
    elif not isinstance(model, PreTrainedModel) or not model.name_or_path:
        look.skipped.append("weights: the model was not loaded from a folder")
    elif getattr(model, "hf_quantizer", None) is not None:
        look.skipped.append("weights: the model was quantized while it was loaded")
    elif not root.is_dir():
        look.skipped.append(f"weights: it was loaded from {root}, which is not a folder")
    else:
        digests: dict[Path, str] = {}
        for folder in _candidates(root, look.cache.encodings.name, model):
            digests[folder] = sha256_of_weights(folder)[0]
            if digests[folder] == wanted:
                look.compared.append(f"weights: those in {folder}")
                _compare_tensors(look, folder, model)
                return
        if digests:
            found = ", ".join(f"{digest} in {folder}" for folder, digest in digests.items())
            raise look.refuse(
                f"the weights in {root} are not those that the cache was filled with: expected "
                f"sha256 {wanted}, got {found}",
                "Load the encoder of the cache, or fill a cache from this one.",
            )
        kind = f"safetensors of a {model.config.model_type}"
        look.skipped.append(f"weights: {root} holds no {kind}, nor do its subfolders")


def _candidates(root: Path, name: str, model: PreTrainedModel) -> Iterator[Path]:
    """The folders that a model may come from: `name_or_path` does not have its `subfolder`."""
    inside = sorted(root.iterdir(), key=lambda one: (one.name != name, one.name))
    kind = model.config.model_type
    for folder in (root, *inside):
        if folder != root:
            try:
                config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
                if config.get("model_type") != kind:
                    continue
            except (OSError, ValueError, AttributeError):
                continue
        with suppress(SourceError):  # pickles; whatever they are, they cannot be compared
            if find_weight_files(folder):
                yield folder


def _compare_tensors(look: _Look, folder: Path, model: PreTrainedModel) -> None:
    """Compare every tensor of the model with what transformers would load into its place."""
    state, kind = model.state_dict(), type(model)
    try:
        config = kind.config_class.from_dict(model.config.to_dict())
        with torch.device("meta"):
            own = kind(config).state_dict()
        checkpoint = Checkpoint(folder, kind, config, read_stored(folder).tensors, dropped=("",))
        with quiet_transformers():
            stored = name_weights(checkpoint, [name for name in state if name in own])
    except SourceError as error:
        what = f"weights: {len(state)} tensors of the model not compared: {error.message}"
        look.skipped.append(what)
        return
    known = [
        name
        for name, tensor in stored.items()
        if not state[name].is_meta and state[name].is_floating_point() == tensor.is_floating_point()
    ]
    for name in known:
        now = state[name].detach().cpu()
        if now.shape != stored[name].shape or not torch.equal(now, stored[name].to(now.dtype)):
            raise look.refuse(
                f"{name} of the encoder is not as in {folder}: it was changed since it was loaded, "
                "or loaded from elsewhere",
                "Cached outputs are those of the weights in the folder; load these.",
            )
    if known:
        look.compared.append(f"weights: {len(known)} tensors of the model, each as in the folder")
    rest = [name for name in state if name not in known]
    if rest:
        look.skipped.append(
            f"weights: {len(rest)} of {len(state)} tensors of the model not compared, first "
            f"{rest[0]}: offloaded, quantized, or of no place in the folder"
        )
