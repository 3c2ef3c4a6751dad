"""`CachedEncoder`: stands where a pipeline or a trainer has its text encoder, and loads no weights.

    pipe = FluxPipeline.from_pretrained(path, text_encoder_2=None)
    pipe.text_encoder_2 = CachedEncoder("CACHE", "text_encoder_2")

What it looks up is what `enginecast cache fill` stored: token ids are all that it goes by.
"""

import inspect
import os
import typing
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import fields
from typing import Any, NoReturn, Self

import numpy as np
import torch
import transformers
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, PreTrainedConfig, modeling_outputs
from transformers.models.clip.modeling_clip import CLIPTextModelOutput
from transformers.utils import ModelOutput

from enginecast.cache.read.datasets import as_batch
from enginecast.cache.read.reader import EmbeddingCache, open_cache, query_of
from enginecast.cache.store.spec import About, EncoderSpec
from enginecast.capture.outputs.flatten import HIDDEN_STATES, RAW
from enginecast.capture.outputs.partial import UncountedHiddenStates, assemble
from enginecast.errors import CacheError, UsageError
from enginecast.runtime.values.arrays import Array

_NO_EFFECT = ("use_cache", "cache_position")
"""Arguments that change nothing in what an encoder gives for a whole text."""


class CachedEncoder(nn.Module):
    """A drop-in for a text encoder that looks its outputs up in a cache.  It has no weights.

    It has one empty parameter per output, because libraries find a model's device and dtype by
    `next(encoder.parameters())`, and accelerate looks parameters up in its `state_dict`.

    Rows that are not stored, such as padding, are zeros.

    Args:
        cache: the path of a cache, or an open one.
        name: the encoder's name in the cache; None: the only encoder.
        dtype: dtype of the outputs; None: as stored.  `.to`, `.half` and the like change it.

    Raises:
        CacheError: there is no such cache or encoder.

    Examples:
        >>> import torch
        >>> from enginecast.cache import CachedEncoder
        >>> encoder = CachedEncoder("captions.cache", dtype=torch.bfloat16)
        >>> ids = torch.tensor(encoder.cache.by_text("a red fox").ids)
        >>> encoder(ids[None]).last_hidden_state.dtype
        torch.bfloat16
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
            place = torch.empty(0, dtype=dtype or getattr(torch, one.dtype))
            self.register_parameter(f"_output_{number}", nn.Parameter(place, requires_grad=False))
        self.config = _config(self.cache)
        names = [one.name.removeprefix(RAW) for one in self.spec.outputs]
        self._kind = output_class(self.cache.about, names)
        if any(one.name.startswith(RAW) for one in self.spec.outputs):
            # Whoever reads those puts a hook on the last norm, which has no effect here.
            self.model = nn.Module()
            self.model.norm = nn.Identity()

    @property
    def spec(self) -> EncoderSpec:
        """What the entries depend on: the encoder, its inputs and which outputs are stored."""
        return self.cache.spec

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the outputs, which `.to`, `.half` and the like set."""
        return self._places[0].dtype

    @property
    def device(self) -> torch.device:
        """The device of the outputs."""
        return self._places[0].device

    @property
    def _places(self) -> list[Tensor]:
        """An empty tensor for each output, where and in what it is wanted."""
        # By name: in copies that wrappers make for a device these are not parameters any more.
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
        """Look up a batch of texts.

        Args:
            input_ids: token ids, [batch, sequence].
            attention_mask: [batch, sequence], nonzero for tokens.
            output_hidden_states: return the hidden states that are in the cache.
            return_dict: False: return a tuple.

        Returns:
            What the encoder's class returns, on the device of the ids: [batch, sequence, width],
            or [batch, width] for outputs with one row per text.

        Raises:
            CacheMissError: a text is not in the cache; says why.
            CacheError: a requested output is not in the cache, or the mask does not fit.
            UsageError: an argument is not supported, because a cache cannot answer it.
        """
        if output_attentions:
            raise UsageError("output_attentions: a cache holds no attention weights")
        if others.get("inputs_embeds") is not None:
            raise UsageError(
                "inputs_embeds: a cache is asked by token ids, and cannot tell what embeddings"
                " mean",
                hint="Give input_ids, or load the encoder itself.",
            )
        for name, value in others.items():
            types = ("token_type_ids", "mm_token_type_ids")
            neutral = isinstance(value, Tensor) and name in types and not value.any()
            if value is not None and value is not False and name not in _NO_EFFECT and not neutral:
                raise UsageError(f"{name}: the cached outputs were computed without it")
        if input_ids is None:
            raise UsageError("input_ids: expected int64 [batch, sequence], got None")
        _require_tensor("input_ids", input_ids)
        if input_ids.ndim != 2 or input_ids.is_floating_point():
            got = f"{input_ids.dtype} {list(input_ids.shape)}"
            raise UsageError(f"input_ids: expected int64 [batch, sequence], got {got}")
        if not len(input_ids):
            raise UsageError("input_ids: expected at least one text, got a batch of 0")
        ids = input_ids.detach().cpu().numpy().astype(np.int64)
        masks = _masks_of(attention_mask, ids)
        if position_ids is not None:
            _require_tensor("position_ids", position_ids)
            _require_counted(position_ids.detach().cpu().numpy(), masks, ids)
        elif any(mask is not None and (np.diff(np.flatnonzero(mask)) > 1).any() for mask in masks):
            raise UsageError(
                "position_ids: expected those that count tokens, got None",
                hint="They make the padding between tokens change nothing, which the cache needs.",
            )
        pairs = zip(ids, masks, strict=True)
        entries = self.cache.look_up([query_of(self.spec, row, mask) for row, mask in pairs])
        tensors = {}
        for one, place in zip(self.spec.outputs, self._places, strict=True):
            batch = as_batch(self.spec, one, entries, ids.shape[1], masks)
            tensors[one.name.removeprefix(RAW)] = batch.to(input_ids.device, place.dtype)
        layers = getattr(self.config.get_text_config(), "num_hidden_layers", None)
        hidden = self._asked(output_hidden_states, "output_hidden_states", False)
        count = layers + 1 if isinstance(layers, int) else None
        made = assemble(
            self._kind, tensors, count, absent_output, hidden=hidden, uncounted=CachedHiddenStates
        )
        return made if self._asked(return_dict, "return_dict", True) else made.to_tuple()

    def _asked(self, given: bool | None, name: str, default: bool) -> bool:
        return bool(getattr(self.config, name, default) if given is None else given)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            if name.startswith("_") or "cache" not in vars(self):
                raise
            raise AttributeError(
                f"CachedEncoder.{name}: it has only the outputs of {self.cache.about.encoder},"
                " whose weights are not loaded"
            ) from error

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Do nothing for False; refuse True, because there are no weights to train.

        Args:
            requires_grad: False.

        Raises:
            UsageError: it is True.
        """
        if requires_grad:
            _refuse("requires_grad_(True)", "it has no weights, so nothing in it can be trained")
        return self

    def save_pretrained(self, *places: Any, **options: Any) -> NoReturn:
        """Refuse: a cache has outputs, not weights.

        Args:
            places: ignored.
            options: ignored.

        Raises:
            UsageError: always.
        """
        _refuse("save_pretrained", "it has no weights; the cache's folder is what to keep")

    def extra_repr(self) -> str:
        return f"{str(self.cache.path)!r}, entries={len(self.cache)}"


def _refuse(what: str, why: str) -> NoReturn:
    raise UsageError(
        f"CachedEncoder: {what}: {why}",
        hint="Load the encoder itself to train or change it; its outputs cannot be cached then.",
    )


def _require_tensor(name: str, given: Any) -> None:
    if not isinstance(given, Tensor):
        raise UsageError(
            f"{name}: expected a tensor [batch, sequence], got a {type(given).__name__}",
            hint="Ask the tokenizer for tensors: return_tensors='pt'.",
        )


def _require_counted(given: Array, masks: Sequence[Array | None], ids: Array) -> None:
    """Refuse positions that count neither the ids of a row nor its tokens, from 0."""
    every = np.broadcast_to(np.arange(ids.shape[1]), ids.shape)
    tokens = [every[0] if one is None else np.cumsum(one).clip(min=1) - 1 for one in masks]
    gaps = any(one is not None and (np.diff(np.flatnonzero(one)) > 1).any() for one in masks)
    for counted in (np.stack(tokens), *([] if gaps else [every])):
        # Three planes, which are equal for texts, where there is a rotary embedding of images.
        if given.ndim <= 3 and given.shape[-1:] == counted.shape[-1:]:
            with suppress(ValueError):
                if (np.broadcast_to(given, (*given.shape[:-2], *counted.shape)) == counted).all():
                    return
    raise UsageError("position_ids: expected those that count from 0, as when the cache was filled")


def _masks_of(mask: Tensor | None, ids: Array) -> list[Array | None]:
    if mask is None:
        return [None] * len(ids)
    _require_tensor("attention_mask", mask)
    if tuple(mask.shape) != ids.shape:
        raise UsageError(
            f"attention_mask: expected {list(ids.shape)} as input_ids, got {list(mask.shape)}"
        )
    if not ((mask == 0) | (mask == 1)).all():
        raise UsageError("attention_mask: expected zeros and ones")
    return list(mask.detach().cpu().to(torch.bool).numpy())


def _config(cache: EmbeddingCache) -> Any:
    """The model's configuration; without one, what the spec says."""
    given = cache.about.config
    known = given.get("model_type")
    if known in CONFIG_MAPPING:
        return CONFIG_MAPPING[known].from_dict(given)
    width = next((one.width for one in cache.spec.outputs if one.per == "token"), None)
    return PreTrainedConfig.from_dict({"hidden_size": width, **given})


class AbsentOutputError(CacheError, AttributeError):
    """An output that the cache does not hold was used.

    An AttributeError, too: accelerate and others ask by `hasattr` what an output is.
    """


def absent_output(name: str, there: str) -> CacheError:
    if name == HIDDEN_STATES:
        return CacheError(
            f"{name}: expected one index, as the cache does not know how many the model has",
            hint="Give the model's config.json beside the bundle when the cache is filled.",
        )
    return AbsentOutputError(
        f"{name} is not in the cache, which has {there}",
        hint=f"Fill a cache with --outputs {name} besides what is needed.",
    )


class CachedHiddenStates(UncountedHiddenStates):
    """Hidden states of a cache that does not know how many the model has."""

    @staticmethod
    def refuse(name: str, there: str) -> CacheError:
        return absent_output(name, there)


def output_class(about: About, names: Sequence[str]) -> type[ModelOutput]:
    """What the encoder's class says that its forward returns.

    Where the class is not known, or what it returns has no place for the outputs, they decide.
    """
    model = getattr(transformers, about.encoder, None)
    if inspect.isclass(model):
        returned = typing.get_type_hints(getattr(model, "forward", None)).get("return")
        there = {name.partition(".")[0] for name in names}
        for kind in (returned, *typing.get_args(returned)):
            if inspect.isclass(kind) and issubclass(kind, ModelOutput):
                found: type[ModelOutput] = kind
                if there <= {field.name for field in fields(found)}:
                    return found
                break
    made: type[ModelOutput] = modeling_outputs.BaseModelOutput
    if "text_embeds" in names:
        made = CLIPTextModelOutput
    elif "pooler_output" in names:
        made = modeling_outputs.BaseModelOutputWithPooling
    return made
