"""`CachedEncoder`: stands where a pipeline or a trainer has its text encoder, and loads no weights.

    pipe = FluxPipeline.from_pretrained(path, text_encoder_2=None)
    pipe.text_encoder_2 = CachedEncoder("CACHE", "text_encoder_2")

What it looks up is what `enginecast cache fill` stored: token ids are all that it goes by.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn, Self

import numpy as np
import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING

from enginecast.cache.asking import asked_of
from enginecast.cache.model_output import assemble, output_class
from enginecast.cache.reader import EmbeddingCache, open_cache
from enginecast.cache.shard_writing import Entry
from enginecast.cache.spec import EncoderSpec
from enginecast.cache.tensors import as_batch, dtype_of
from enginecast.errors import UsageError
from enginecast.runtime.arrays import Array

_NO_EFFECT = ("use_cache", "cache_position")
"""Arguments that change nothing in what an encoder gives for a whole text."""


class CachedEncoder(nn.Module):
    """A text encoder whose outputs were computed before.  It has no weights.

    It does have a parameter without elements for each output: what moves and casts models goes by
    `next(encoder.parameters())`, and accelerate looks its parameters up in its `state_dict`.

    Rows that are not stored (padding, or those the spec drops) are zeros.

    Args:
        cache: path of a cache, or an open one.
        name: of the encoder in it; None: the only one.
        dtype: of the outputs; None: as they are stored.  `.to`, `.half` and the like change it.

    Raises:
        CacheError: there is no such cache or encoder.
    """

    def __init__(
        self,
        cache: str | os.PathLike[str] | EmbeddingCache,
        name: str | None = None,
        *,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.cache = cache if isinstance(cache, EmbeddingCache) else open_cache(cache, name)
        for number, one in enumerate(self.spec.outputs):
            place = torch.empty(0, dtype=dtype or dtype_of(one.dtype))
            self.register_parameter(f"_output_{number}", nn.Parameter(place, requires_grad=False))
        self.config = _config(self.cache)
        self._kind = output_class(self.cache.about, [one.name for one in self.spec.outputs])

    @property
    def spec(self) -> EncoderSpec:
        return self.cache.spec

    @property
    def dtype(self) -> torch.dtype:
        """Of the first output, as `.to`, `.half` and the like set it for all."""
        return self._places[0].dtype

    @property
    def device(self) -> torch.device:
        return self._places[0].device

    @property
    def _places(self) -> list[Tensor]:
        """An empty tensor for each output, where and in what it is wanted."""
        # By name: in copies that wrappers make for a device these are no parameters any more.
        return [getattr(self, f"_output_{number}") for number in range(len(self.spec.outputs))]

    def _load_from_state_dict(self, *given: Any) -> None:
        """There is nothing to load; a checkpoint made without this encoder misses nothing."""
        state, prefix, _, strict, _, unexpected, _ = given
        if strict:
            known = {prefix + name for name in self._parameters}
            unexpected += [one for one in state if one.startswith(prefix) and one not in known]

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # no graph reads files
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        return_dict: bool | None = None,
        **others: Any,
    ) -> Any:
        """Look the texts of a batch up.

        Args:
            input_ids: [batch, sequence]
            attention_mask: [batch, sequence], not zero for tokens.
            output_hidden_states: give those that are in the cache.
            return_dict: False: a tuple.

        Returns:
            What the encoder's class returns, on the device of the ids:
            [batch, sequence, width], or [batch, width] for an output per text.

        Raises:
            CacheMissError: a text is not in the cache; says why.
            CacheError: the outputs that are asked for are not, or the mask does not fit them.
            UsageError: an argument that no cache can answer.
        """
        _require_answerable(output_attentions, others)
        if input_ids is None:
            raise UsageError("input_ids: expected int64 [batch, sequence], got None")
        ids = _rows_of(input_ids)
        _require_counted(position_ids, ids)
        entries = self._look_up(ids, _mask_of(attention_mask, ids))
        tensors = {
            one.name: as_batch(self.spec, one, entries, ids.shape[1]).to(
                input_ids.device, place.dtype
            )
            for one, place in zip(self.spec.outputs, self._places, strict=True)
        }
        hidden = self._asked(output_hidden_states, "output_hidden_states", False)
        made = assemble(self._kind, tensors, self._hidden_count(), hidden=hidden)
        return made if self._asked(return_dict, "return_dict", True) else made.to_tuple()

    def _look_up(self, ids: Array, mask: Array | None) -> list[Entry]:
        masks = [None] * len(ids) if mask is None else list(mask)
        pairs = zip(ids, masks, strict=True)
        return self.cache.look_up([asked_of(self.spec, row, one) for row, one in pairs])

    def _asked(self, given: bool | None, name: str, default: bool) -> bool:
        return bool(getattr(self.config, name, default) if given is None else given)

    def _hidden_count(self) -> int | None:
        of_text = getattr(self.config, "get_text_config", lambda: self.config)()
        layers = getattr(of_text, "num_hidden_layers", None)
        return layers + 1 if isinstance(layers, int) else None

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            if name.startswith("_") or "cache" not in vars(self):
                raise
            raise AttributeError(
                f"CachedEncoder.{name}: it has the outputs of {self.cache.about.encoder}, and "
                "none of its parts: the weights were not loaded"
            ) from error

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Nothing to do for False; there is nothing that could learn."""
        if requires_grad:
            _refuse("requires_grad_(True)", "it has no weights, so nothing in it can be trained")
        return self

    def get_input_embeddings(self) -> NoReturn:
        _refuse("get_input_embeddings", "it has no embeddings: the weights were not loaded")

    def set_input_embeddings(self, value: Any) -> NoReturn:
        _refuse("set_input_embeddings", "the outputs were computed with the embeddings there were")

    def resize_token_embeddings(self, *sizes: Any, **options: Any) -> NoReturn:
        _refuse("resize_token_embeddings", "texts with new tokens have no outputs in the cache")

    def add_adapter(self, *adapters: Any, **options: Any) -> NoReturn:
        _refuse("add_adapter", "an adapter changes outputs that were computed before")

    def load_adapter(self, *adapters: Any, **options: Any) -> NoReturn:
        _refuse("load_adapter", "an adapter changes outputs that were computed before")

    def gradient_checkpointing_enable(self, *options: Any, **named: Any) -> NoReturn:
        _refuse("gradient_checkpointing_enable", "no gradient goes through outputs that are read")

    def save_pretrained(self, *places: Any, **options: Any) -> NoReturn:
        _refuse("save_pretrained", "it has no weights; the cache's folder is what to keep")

    def extra_repr(self) -> str:
        return f"{str(self.cache.path)!r}, entries={len(self.cache)}"


def _refuse(what: str, why: str) -> NoReturn:
    raise UsageError(
        f"CachedEncoder: {what}: {why}",
        hint="Load the encoder itself to train or change it; its outputs cannot be cached then.",
    )


def _require_answerable(output_attentions: bool | None, others: Mapping[str, Any]) -> None:
    if output_attentions:
        raise UsageError("output_attentions: a cache holds no attention weights")
    if others.get("inputs_embeds") is not None:
        raise UsageError(
            "inputs_embeds: a cache is asked by token ids, and cannot tell what embeddings mean",
            hint="Give input_ids, or load the encoder itself.",
        )
    for name, value in others.items():
        neutral = isinstance(value, Tensor) and name == "token_type_ids" and not value.any()
        if value is not None and value is not False and name not in _NO_EFFECT and not neutral:
            raise UsageError(f"{name}: the cached outputs were computed without it")


def _require_tensor(name: str, given: Any) -> None:
    if not isinstance(given, Tensor):
        raise UsageError(
            f"{name}: expected a tensor [batch, sequence], got a {type(given).__name__}",
            hint="Ask the tokenizer for tensors: return_tensors='pt'.",
        )


def _rows_of(input_ids: Tensor) -> Array:
    _require_tensor("input_ids", input_ids)
    if input_ids.ndim != 2 or input_ids.is_floating_point():
        got = f"{input_ids.dtype} {list(input_ids.shape)}"
        raise UsageError(f"input_ids: expected int64 [batch, sequence], got {got}")
    if not len(input_ids):
        raise UsageError("input_ids: expected at least one text, got a batch of 0")
    return input_ids.detach().cpu().numpy().astype(np.int64)


def _mask_of(mask: Tensor | None, ids: Array) -> Array | None:
    if mask is None:
        return None
    _require_tensor("attention_mask", mask)
    if tuple(mask.shape) != ids.shape:
        raise UsageError(
            f"attention_mask: expected {list(ids.shape)} as input_ids, got {list(mask.shape)}"
        )
    if not ((mask == 0) | (mask == 1)).all():
        raise UsageError("attention_mask: expected zeros and ones")
    return mask.detach().cpu().to(torch.bool).numpy()


def _require_counted(position_ids: Tensor | None, ids: Array) -> None:
    if position_ids is None:
        return
    _require_tensor("position_ids", position_ids)
    counted = torch.arange(ids.shape[1]).expand(ids.shape)
    given = position_ids.detach().cpu()
    if given.ndim > 2 or given.shape[-1:] != counted.shape[-1:] or (given != counted[:1]).any():
        raise UsageError("position_ids: the cached outputs were computed with those from 0 on")


def _config(cache: EmbeddingCache) -> Any:
    """The model's configuration; without one, what the spec says."""
    given = cache.about.config
    known = given.get("model_type")
    if known in CONFIG_MAPPING:
        return CONFIG_MAPPING[known].from_dict(given)
    width = next((one.width for one in cache.spec.outputs if one.per == "token"), None)
    return PlainConfig({"hidden_size": width, **given}, cache.path)


class PlainConfig:
    """What is known of a model whose config.json is not in the cache, or of no known kind."""

    def __init__(self, known: Mapping[str, Any], path: Path) -> None:
        vars(self).update(known)
        self._path = path

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # what copying looks for, before there is a path
            raise AttributeError(name)
        raise AttributeError(f"config.{name}: {self._path} does not have the model's configuration")

    def __repr__(self) -> str:
        return (
            f"PlainConfig({ {name: one for name, one in vars(self).items() if name != '_path'} })"
        )
