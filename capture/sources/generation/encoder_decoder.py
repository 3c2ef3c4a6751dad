"""An encoder and a decoder as two engines: what is computed once for an input, and a step.

The engine of the encoder gives the keys and values that every layer of the decoder attends to, so
that they are projected once.  The decoder takes them as inputs, beside the keys and values of the
tokens before.  Models that transformers runs with an `EncoderDecoderCache` come apart this way.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import (
    AutoModelForImageTextToText,
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
    DynamicCache,
    EncoderDecoderCache,
    GenerationMixin,
    PreTrainedConfig,
)
from transformers.modeling_outputs import BaseModelOutput

from enginecast.capture.inputs.derive.known_inputs import TARGET_VOCABULARIES, batch
from enginecast.capture.inputs.examples import example_sizes, without_data
from enginecast.capture.inputs.given import DynamicOption
from enginecast.capture.inputs.specs import (
    BATCH,
    DimSpec,
    InputSpec,
    named_dims,
    with_example_sizes,
)
from enginecast.capture.inputs.text_config import decoder_of, longest_target, number_of
from enginecast.capture.python.quiet import quiet_torch, quiet_transformers
from enginecast.capture.sources.base.source import Source
from enginecast.capture.sources.base.wrapped import WrappedSource
from enginecast.capture.sources.generation.decoder import (
    LOGITS,
    OF_CACHE,
    OF_MASK,
    PRESENT,
    TEXT_GENERATION,
    TOTAL,
    DecoderSource,
    Kept,
    Layer,
    as_decoder,
    cache_argument,
    check_task,
    generates,
    kept_inputs,
    kept_layers,
    require_generating,
    require_tokens_after_others,
    tokens_before_and_new,
    without_values,
)
from enginecast.capture.sources.weights.empty import fake_weights
from enginecast.errors import SourceError, UsageError

ENCODER = "encoder"
"""The folder of its bundle, within that of the decoder."""
IDS, MASK, ENCODER_MASK = "decoder_input_ids", "decoder_attention_mask", "encoder_attention_mask"
OWN_MASK = "attention_mask"
CROSS = "cross_key_values"
OF_TEXT = "input_ids"
NOT_ENCODED = ("past_key_values", "cache", "encoder_outputs", "labels", "use_cache", "return_dict")
"""Arguments of `forward`, besides those that begin with "decoder_", that are not the encoder's."""
OF_ENCODED = "expected keys, values and a mask of as many tokens as the encoder gave"
HINT = "Leave --kv-cache out to export the model without a cache."
ENCODED = "encoder_sequence"
ROWS = 2
"""Batch size of the encoder runs that determine its output length."""
LENGTH = 5
"""Of the encoder's output in the run that shows what the layers keep."""


@dataclass(frozen=True)
class Sides:
    """What the layers of a decoder keep."""

    own: tuple[Layer, ...]
    """Of the tokens before."""
    cross: tuple[Layer, ...]
    """Of the encoder's output."""


@dataclass
class Encoded(BaseModelOutput):  # type: ignore[misc] # it has no types
    """What an encoder gave.  Classes add fields, such as the logits of routers, which nothing that
    is kept needs.
    """

    def __getattr__(self, name: str) -> None:
        if name.startswith("_"):
            raise AttributeError(name)


class EncoderSource(WrappedSource):
    """The encoder of another source's model, up to the keys and values of the decoder's layers."""

    takes_file = False

    def __init__(self, model: Source) -> None:
        super().__init__(model)
        self.name = f"{model.name} ({ENCODER})"

    @cached_property
    def is_masked(self) -> bool:
        """Whether its input is text, of which a mask marks the padding."""
        main = getattr(self.model_class, "main_input_name", OF_TEXT)
        return main == OF_TEXT and OWN_MASK in self._model.forward_arguments

    @property
    def forward_signature(self) -> inspect.Signature:
        known = self._model.forward_signature
        kind = inspect.Parameter.KEYWORD_ONLY
        return inspect.Signature(
            [
                parameter.replace(kind=kind)
                for name, parameter in known.parameters.items()
                if not name.startswith("decoder_")
                and name not in NOT_ENCODED
                and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
            ]
        )

    @property
    def _fingerprint(self) -> Mapping[str, str]:
        return {**self._model.fingerprint(), "task": TEXT_GENERATION, "part": ENCODER}

    def eager(self, dtype: torch.dtype = torch.float32) -> nn.Module:
        return self._projecting(self._model.eager(dtype))

    def empty(self) -> nn.Module:
        return self._projecting(self._model.empty())

    def of_part(
        self, options: Sequence[DynamicOption], specs: Sequence[InputSpec]
    ) -> Sequence[DynamicOption]:
        names = {spec.name for spec in specs}
        return [option for option in options if option.input in names]

    def length_of_output(self, specs: Sequence[InputSpec]) -> DimSpec:
        """The sequence dimension of the output: static if all inputs give one length.

        Args:
            specs: its inputs.

        Raises:
            SourceError: it does not run.
        """
        module = self.empty()
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        fake_weights(module, mode)
        dims = named_dims(specs)
        least = {name: dim.minimum for name, dim in dims.items()}
        most = {name: dim.maximum for name, dim in dims.items()}
        lengths = []
        for sizes in (least, example_sizes(specs), most):
            inputs = without_data(specs, {**sizes, BATCH: ROWS})
            try:
                with torch.no_grad(), quiet_torch(), quiet_transformers(), mode:
                    fakes = {n: torch.empty(t.shape, dtype=t.dtype) for n, t in inputs.items()}
                    found: Mapping[str, Tensor] = module(**fakes)
            except Exception as error:  # the model's own code
                raise SourceError(
                    f"{self.name} does not run without values, which tells the length of its"
                    f" output: {type(error).__name__}: {error}",
                    hint=HINT,
                ) from error
            lengths.append(int(next(iter(found.values())).shape[2]))
        low, example, high = lengths
        if low == high:
            return DimSpec.static(low)
        return DimSpec(ENCODED, example, max(low, 1), high)

    def _projecting(self, module: nn.Module) -> nn.Module:
        """Make `module` give the keys and values of its decoder's layers, in place.

        The decoder reads one token, of which nothing but these is looked at: what else it computes
        is dead, and no part of the program.
        """
        plain: Callable[..., Any] = type(module).forward
        options, cache_name = {"use_cache": True, "return_dict": True}, cache_argument(type(module))

        def forward(*args: Any, **tensors: Any) -> Any:
            if args or any(name.startswith("decoder_") for name in tensors):
                return plain(module, *args, **tensors)  # the model's own code calls it
            cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
            first = next(tensor for tensor in tensors.values() if tensor is not None)
            ids = torch.zeros(first.shape[0], 1, dtype=torch.int64)
            given = {IDS: ids, cache_name: cache, **options}
            if tensors.get(OWN_MASK) is not None:
                given[OWN_MASK] = tensors[OWN_MASK]
            owner: Any = module
            encoded = owner.get_encoder()(**tensors, return_dict=True)  # as `generate` does
            plain(module, encoder_outputs=encoded, **given)
            kept = cache.cross_attention_cache.layers
            return {
                f"{CROSS}_{n}_{kind}": tensor
                for n, each in enumerate(kept)
                for kind, tensor in (("key", each.keys), ("value", each.values))
            }

        forward.__signature__ = self.forward_signature  # type: ignore[attr-defined]
        forward.__wrapped__ = plain  # type: ignore[attr-defined]
        module.forward = forward
        return module


class CrossDecoderSource(DecoderSource):
    """The decoder of such a model, as a step of `generate`."""

    ids, mask = IDS, MASK

    @cached_property
    def encoder(self) -> EncoderSource:
        """The other part."""
        return EncoderSource(self._model)

    def parts(self) -> Mapping[str, Source]:
        return {ENCODER: self.encoder}

    @cached_property
    def sides(self) -> Sides:
        """What each layer keeps.

        Raises:
            SourceError: the model keeps something else, or does not run.
        """
        width = self.width  # of a module that is built outside of the mode
        module = self._model.empty()
        cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
        given = {
            IDS: torch.zeros(1, 2, dtype=torch.int64),
            "encoder_outputs": Encoded(last_hidden_state=torch.zeros(1, LENGTH, width)),
            cache_argument(type(module)): cache,
            "use_cache": True,
        }
        what = f"the decoder of {type(module).__name__}"
        with without_values(self.name, what, module, HINT):
            module(**given)
            own, cross = cache.self_attention_cache.layers, cache.cross_attention_cache.layers
            found = Sides(
                kept_layers(self.name, own, 2, HINT), kept_layers(self.name, cross, LENGTH, HINT)
            )
            require_tokens_after_others(
                self.name, lambda mask: module(**given, **{MASK: mask}), HINT
            )
        if not found.own or len(found.own) != len(found.cross):
            raise SourceError(
                f"{self.name}: expected as many layers that keep keys and values of tokens as of"
                f" the encoder's output, got {len(found.own)} and {len(found.cross)}",
                hint=HINT,
            )
        return found

    @cached_property
    def width(self) -> int:
        """Of the encoder's output.

        Raises:
            SourceError: the encoder's config does not say it.
        """
        module: Any = self._model.empty()
        config = getattr(module.get_encoder(), "config", self.config)
        found = getattr(config, "hidden_size", None)
        if type(found) is not int:
            raise SourceError(
                f"{self.name}: the config does not say how wide the encoder's output is", hint=HINT
            )
        return found

    @property
    def layers(self) -> tuple[Layer, ...]:
        return self.sides.own

    @property
    def cross(self) -> tuple[str, ...]:
        """Names of the inputs that the encoder gives, in the order of the layers."""
        return tuple(
            f"{CROSS}_{n}_{kind}"
            for n, layer in enumerate(self.sides.cross)
            for kind in layer.widths()
        )

    @property
    def takes_positions(self) -> bool:
        return False

    @property
    def restarts(self) -> tuple[int, ...]:
        return ()

    @property
    def start_ids(self) -> tuple[int, ...]:  # type: ignore[override] # of the base, it is known
        """Ids that every text begins with.

        Raises:
            SourceError: no config names one.
        """
        config = self.generation_config
        for name in ("decoder_start_token_id", "bos_token_id"):
            found = getattr(config, name, None)
            if type(found) is int and found >= 0:
                return (found, *self._forced)
        raise SourceError(
            f"{self.name}: expected decoder_start_token_id in the generation config, which the"
            " decoder begins with",
            hint="Set it in generation_config.json.",
        )

    @property
    def _forced(self) -> tuple[int, ...]:
        """The ids that follow the first one by `forced_decoder_ids` [place, id], of which
        transformers' own `generate` knows nothing.
        """
        given = getattr(self.generation_config, "forced_decoder_ids", None) or ()
        if not self.has_own_generate:
            return ()
        known = {place: each for place, each in given}
        ids = [known.get(place) for place in range(1, len(known) + 1)]
        whole = tuple(each for each in ids if type(each) is int)
        return whole if len(whole) == len(ids) else ()

    @property
    def has_own_generate(self) -> bool:
        """Whether the class has another `generate` than transformers' own."""
        return getattr(self.model_class, "generate", None) is not GenerationMixin.generate

    @property
    def not_heeded(self) -> tuple[str, ...]:  # type: ignore[override]
        given = getattr(self.generation_config, "forced_decoder_ids", None)
        skipped = bool(given) and self.has_own_generate and not self._forced
        return ("forced_decoder_ids",) if skipped else ()

    @property
    def names(self) -> tuple[str, ...]:
        masks = (self.mask, ENCODER_MASK) if self.encoder.is_masked else (self.mask,)
        return (self.ids, *masks, *self.past, *self.cross)

    @property
    def _fingerprint(self) -> Mapping[str, str]:
        return {**super()._fingerprint, "start": " ".join(map(str, self.start_ids))}

    def inputs(self) -> tuple[InputSpec, ...]:
        """`decoder_input_ids` [batch, sequence], `decoder_attention_mask` [batch, total],
        `encoder_attention_mask` [batch, encoder_sequence] where the encoder reads text, the keys
        and values [batch, heads, past, width] of each layer, and those of the encoder's output
        [batch, heads, encoder_sequence, width], where total is past + sequence.

        Raises:
            SourceError: the encoder does not run.
            UsageError: the config has no vocabulary.
        """
        config = self.config
        size = None if config is None else number_of(decoder_of(config), *TARGET_VOCABULARIES)
        if config is None or size is None:
            raise UsageError(f"{self.name}: the config does not say how large the vocabulary is")
        most = longest_target(config)
        past, sequence = tokens_before_and_new(self.name, most)
        total = DimSpec.sum_of(TOTAL, (past, sequence), cap=most)
        length = self.encoder.length_of_output(self.encoder.inputs())
        ending = next(iter(self.endings), None)
        specs = [
            InputSpec(
                *(self.ids, "token_ids", torch.int64, (batch(), sequence), 0, size - 1),
                *(self.padding, ending),
            ),
            # What a decoder reads has no padding: ones alone.
            InputSpec(self.mask, "tensor", torch.int64, (batch(), total), 1, 1),
        ]
        if self.encoder.is_masked:
            dims = (batch(), length)
            specs.append(InputSpec(ENCODER_MASK, "attention_mask", torch.int64, dims, 0, 1))
        own = kept_inputs(self.past, self.sides.own, past)
        cross = kept_inputs(self.cross, self.sides.cross, length)
        return with_example_sizes((*specs, *own, *cross))

    def of_part(
        self, options: Sequence[DynamicOption], specs: Sequence[InputSpec]
    ) -> Sequence[DynamicOption]:
        """Those of no part are the decoder's, which refuses them."""
        encoders = {spec.name for spec in self.encoder.inputs()}
        return [option for option in options if option.input not in encoders]

    def encode(
        self, prompts: Sequence[str], specs: Sequence[InputSpec]
    ) -> dict[str, Tensor] | None:
        return None  # its encoder reads them

    def _stepping(self, module: nn.Module) -> nn.Module:
        plain: Callable[..., Any] = type(module).forward
        names, past, cross, width = set(self.names), self.past, self.cross, self.width
        layers, cache_name = len(self.layers), cache_argument(type(module))

        def forward(*args: Any, **tensors: Any) -> Any:
            if args or tensors.keys() != names:
                return plain(module, *args, **tensors)  # the model's own code calls it
            kept, read = ([tensors[name] for name in each] for each in (past, cross))
            tokens, length = kept[0].shape[2], read[0].shape[2]
            # A trace learns from these how the sizes belong together.
            for tensor in kept:
                torch._check(tensor.shape[2] == tokens, lambda: OF_CACHE)
            for tensor in read:
                torch._check(tensor.shape[2] == length, lambda: OF_ENCODED)
            torch._check(tensors[MASK].shape[1] == tokens + tensors[IDS].shape[1], lambda: OF_MASK)
            cache = EncoderDecoderCache(_cache(kept), _cache(read))
            cache.is_updated = dict.fromkeys(range(layers), True)
            # Nothing of it but its shape is read: what it would be projected to is there.
            hidden = read[0].new_zeros(read[0].shape[0], length, width)
            given = {IDS: tensors[IDS], MASK: tensors[MASK], cache_name: cache}
            if ENCODER_MASK in tensors:
                torch._check(tensors[ENCODER_MASK].shape[1] == length, lambda: OF_ENCODED)
                given[OWN_MASK] = tensors[ENCODER_MASK]
            returned = plain(
                module,
                **given,
                encoder_outputs=Encoded(last_hidden_state=hidden),
                use_cache=True,
                return_dict=True,
            )
            own = cache.self_attention_cache.layers
            if len(own) != layers:
                raise RuntimeError(f"expected a cache of {layers} layers, got {len(own)}")
            return {
                LOGITS: returned.logits,
                PRESENT: [{"key": each.keys, "value": each.values} for each in own],
            }

        forward.__signature__ = self.forward_signature  # type: ignore[attr-defined]
        forward.__wrapped__ = plain  # type: ignore[attr-defined]
        module.forward = forward
        return module


def _cache(kept: list[Tensor]) -> DynamicCache:
    cache = DynamicCache()
    cache.layers = [Kept(*pair) for pair in zip(kept[0::2], kept[1::2], strict=True)]
    return cache


def as_generating(source: Source, task: str) -> DecoderSource:
    """The model of a source as a step of `generate`; a `CrossDecoderSource` where an encoder comes
    before.

    Raises:
        UsageError: the task is unknown, or the model is none that transformers generates text with.
    """
    if not getattr(source.config, "is_encoder_decoder", False):
        return as_decoder(source, task)
    check_task(source, task)
    headed = _generating_class(source.config)
    if headed is not None:
        source.take_class(headed)
    known = source.model_class
    needed = (IDS, MASK, "encoder_outputs", cache_argument(known))
    lacking = [name for name in needed if name not in source.forward_arguments]
    what = "generate, whose decoder takes a cache"
    hint = "a ...ForConditionalGeneration"
    require_generating(source, task, known, what, hint, lacking)
    return CrossDecoderSource(source)


def _generating_class(config: PreTrainedConfig | None) -> type[Any] | None:
    """The class with `generate` that a config names, or else that transformers has for it."""
    for name in (config and config.architectures) or ():
        found = getattr(transformers, name, None)
        if generates(found):
            return found
    for kind in (AutoModelForSeq2SeqLM, AutoModelForSpeechSeq2Seq, AutoModelForImageTextToText):
        mapped: type[Any] | None = kind._model_mapping.get(type(config), None)
        if generates(mapped):
            return mapped
    return None
