"""A step of a decoder: a language model of transformers whose cache is inputs and outputs.

`model.generate` hands a cache from call to call.  An engine keeps nothing, so the keys and values
of the tokens before come as `past_key_values_0_key`, ..., and go out as `present.0.key`, with those
of the new tokens appended.  With no tokens before, the same call reads a prompt.
"""

import inspect
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from transformers import AutoModelForCausalLM, DynamicCache, GenerationConfig
from transformers.cache_utils import DynamicLayer

from enginecast.capture.inputs.derive.known_inputs import batch, largest_id
from enginecast.capture.inputs.examples import positions_of
from enginecast.capture.inputs.specs import SEQUENCE, DimSpec, InputSpec, with_example_sizes
from enginecast.capture.inputs.text_config import SEQUENCE_WITHOUT_LIMIT, limit_of, padding_of
from enginecast.capture.python.quiet import quiet_torch, quiet_transformers
from enginecast.capture.sources.base.source import Source
from enginecast.capture.sources.base.wrapped import WrappedSource
from enginecast.capture.sources.weights.empty import fake_weights
from enginecast.errors import SourceError, UsageError, first_line

TEXT_GENERATION: Literal["text-generation"] = "text-generation"
TASKS = (TEXT_GENERATION,)
IDS, MASK, POSITIONS, LOGITS = "input_ids", "attention_mask", "position_ids", "logits"
PAST, PRESENT = "past_key_values", "present"
GENERATION_FILE = "generation_config.json"
SETTINGS = ("do_sample", "temperature", "top_k", "top_p", "repetition_penalty")
CONTROLS = (
    *("suppress_tokens", "begin_suppress_tokens", "forced_bos_token_id"),
    "forced_eos_token_id",
)
"""Fields whose ids are never, or always, generated at some place."""
SUPPRESSED = ("suppress_tokens", "begin_suppress_tokens")
"""Those whose ids are never generated: one that there is not changes nothing."""
BEFORE, TOTAL = "past", "total"
"""Dimensions of the tokens in the cache, and of these and the new ones."""
EXAMPLE_PAST, EXAMPLE_TOKENS = 5, 7
MOST_TOKENS = 1 << 20
"""Longest cache for which a model is asked whether it drops it."""
NEEDS_VALUES = (
    *(DataDependentOutputException, DynamicOutputShapeException),
    *(UnsupportedFakeTensorException, UnsupportedOperatorException),
)
"""What a run without values says of a model that may well run with them."""
OF_CACHE = "expected as many tokens in all keys and values of the cache"
OF_MASK = "expected a mask of the tokens in the cache and of the new ones"
HINT = "Leave --kv-cache out to export the model as an encoder of text, without a cache."


@dataclass(frozen=True)
class Layer:
    """The keys and values that one layer keeps: [batch, heads, tokens, width]."""

    heads: int
    key: int
    """Width of the keys of one head."""
    value: int

    def widths(self) -> dict[str, int]:
        """By what is kept, as it is called in the names of inputs and outputs."""
        return {"key": self.key, "value": self.value}


def _numbers(value: object) -> Iterator[int]:
    """The whole numbers in a config, at any depth."""
    if type(value) is int:
        yield value
    parts = value.values() if isinstance(value, dict) else value
    if isinstance(parts, Iterable) and not isinstance(parts, str):
        for part in parts:
            yield from _numbers(part)


def _drops(model: Any, before: int) -> bool:
    """Whether a model wants to read all tokens again where so many are in its cache."""
    cache = DynamicCache()
    kept = torch.empty(1, 1, before, 1, device="meta")
    cache.layers = [Kept(kept, kept)]
    ids = torch.zeros(1, before + 1, dtype=torch.int64)
    name = cache_argument(type(model))
    try:
        given = model.prepare_inputs_for_generation(
            ids,
            attention_mask=torch.ones_like(ids),
            position_ids=torch.arange(before + 1)[None],
            next_sequence_length=1,
            use_cache=True,
            **{name: cache},
        )
    except Exception:  # the model's own code: what a run of generate needs is compared there
        return False
    return given.get(name) is not cache


def cache_argument(kind: type[Any] | None) -> str:
    """What a model's `forward` calls its cache: transformers renamed it in 5.24, and warns."""
    forward: Any = getattr(kind, "forward", None)
    known = () if forward is None else inspect.signature(forward).parameters
    return "cache" if "cache" in known and PAST not in known else PAST


class Kept(DynamicLayer):  # type: ignore[misc] # it has no types
    """Keys and values that were given.  Their length is a size of theirs, none at all included:
    transformers asks whether there are any, which a trace would answer for all sizes.
    """

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        super().__init__()
        self.lazy_initialization(keys, values)
        self.keys, self.values = keys, values

    def get_seq_length(self) -> int:
        length: int = self.keys.shape[-2]
        return length


class DecoderSource(WrappedSource):
    """A language model of another source, as a step of `generate`."""

    task = TEXT_GENERATION
    ids, mask = IDS, MASK
    """Names of the inputs of new tokens, and of the mask of all tokens."""
    takes_file = False
    start_ids: tuple[int, ...] = ()
    """Ids that every text begins with; none where a prompt is read."""
    not_heeded: tuple[str, ...] = ()
    """Fields of the generation config that decide what is read first, and are not heeded."""

    @cached_property
    def layers(self) -> tuple[Layer, ...]:
        """What each layer keeps.

        Raises:
            SourceError: the model keeps something else, or does not run.
        """
        require_keys_and_values(self.name, self.config, HINT)
        module = self._model.empty()
        cache = DynamicCache()
        ids = torch.zeros(1, 2, dtype=torch.int64)
        given = {IDS: ids, cache_argument(type(module)): cache, "use_cache": True}
        with without_values(self.name, type(module).__name__, module, HINT):
            module(**given, **{MASK: torch.ones_like(ids)})
            found = kept_layers(self.name, cache.layers, 2, HINT)
            if not found:
                raise SourceError(f"{self.name}: the model fills no cache", hint=HINT)
            given |= {POSITIONS: ids + 2} if self.takes_positions else {}
            require_tokens_after_others(
                self.name, lambda mask: module(**given, **{MASK: mask}), HINT
            )
        return found

    @cached_property
    def takes_positions(self) -> bool:
        """Whether `generate` gives the model positions."""
        return POSITIONS in self._model.forward_arguments

    @property
    def past(self) -> tuple[str, ...]:
        """Names of the inputs that hold keys and values, in the order of the layers."""
        return tuple(f"{PAST}_{n}_{kind}" for n, layer in self._numbered for kind in layer.widths())

    @property
    def present(self) -> tuple[str, ...]:
        """Names of the outputs that they become, in the same order."""
        return tuple(f"{PRESENT}.{n}.{k}" for n, layer in self._numbered for k in layer.widths())

    @cached_property
    def generation_config(self) -> GenerationConfig:
        """What the model's own `generate` does where its caller says nothing: as transformers has
        it, of generation_config.json, and of config.json where there is none.

        Raises:
            SourceError: generation_config.json cannot be used.
        """
        if self._model.folder is None:
            found: Any = getattr(self._model.empty(), "generation_config", None)
            return found if isinstance(found, GenerationConfig) else self._config_alone()
        file = self._model.folder / GENERATION_FILE
        if not file.is_file():
            return self._config_alone()
        try:
            with quiet_transformers():
                return GenerationConfig.from_pretrained(self._model.folder, local_files_only=True)
        except Exception as error:  # reading foreign data raises any kind
            raise SourceError(f"{file} cannot be used: {error}") from error

    def _config_alone(self) -> GenerationConfig:
        return (
            GenerationConfig()
            if self.config is None
            else GenerationConfig.from_model_config(self.config)
        )

    @cached_property
    def restarts(self) -> tuple[int, ...]:
        """How many tokens are before a step where `generate` drops the cache and reads all tokens
        again, as where a model changes the frequencies of its positions.  Lengths around the
        numbers of the config are tried: a model knows no others.
        """
        model: Any = self._model.empty()
        numbers = set() if self.config is None else {*_numbers(self.config.to_dict())}
        near = {number + step for number in numbers for step in (-1, 0, 1)}
        return tuple(n for n in sorted(near) if 1 < n <= MOST_TOKENS and _drops(model, n))

    @property
    def settings(self) -> dict[str, Any]:
        """What of it engines heed, by name; but for ids and lengths."""
        asked = {name: getattr(self.generation_config, name, None) for name in SETTINGS}
        return {name: value for name, value in asked.items() if value is not None}

    @property
    def endings(self) -> tuple[int, ...]:
        """Ids that end a text."""
        return self.ids_of("eos_token_id")

    def ids_of(self, name: str) -> tuple[int, ...]:
        """The ids in a field of the generation config; none where it is not set.

        Raises:
            SourceError: the field has an id that the vocabulary has not, which no text can have.
        """
        given: Any = getattr(self.generation_config, name, None)
        known = given if isinstance(given, (list, tuple)) else [given]
        found = tuple(each for each in known if type(each) is int and each >= 0)
        beyond = [each for each in found if self.vocabulary and each >= self.vocabulary]
        if beyond and name not in SUPPRESSED:
            raise SourceError(
                f"{self.name}: {name} of the generation config: expected ids of the vocabulary, 0.."
                f"{self.vocabulary - 1}, got {', '.join(map(str, beyond))}",
                hint=f"Correct {name} in {GENERATION_FILE}, or in config.json where there is none.",
            )
        return found

    @cached_property
    def vocabulary(self) -> int:
        """How many ids there are for what is generated; 0 where the model does not say it."""
        empty: Any = self._model.empty()
        head: Any = getattr(empty, "get_output_embeddings", lambda: None)()
        weight = getattr(head, "weight", None)
        return int(weight.shape[0]) if isinstance(weight, Tensor) and weight.dim() == 2 else 0

    @property
    def padding(self) -> int:
        """The id that fills up a row."""
        return padding_of(self.config) or 0

    @property
    def own_padding(self) -> int | None:
        """The same, where the generation config names one."""
        given: Any = self.generation_config.pad_token_id
        return given if type(given) is int and given >= 0 else None

    @property
    def _numbered(self) -> Sequence[tuple[int, Layer]]:
        return list(enumerate(self.layers))

    def generator(self, dtype: torch.dtype = torch.float32) -> Any:
        """The model as transformers has it, with `generate`; as `eager` in other respects."""
        return self._model.eager(dtype)

    @property
    def _fingerprint(self) -> Mapping[str, str]:
        settings = {**self.settings, "eos": self.endings, "pad": self.own_padding}
        settings |= {name: ids for name in CONTROLS if (ids := self.ids_of(name))}
        return {
            **self._model.fingerprint(),
            "task": TEXT_GENERATION,
            "generation": json.dumps(settings, sort_keys=True),
        }

    def eager(self, dtype: torch.dtype = torch.float32) -> nn.Module:
        return self._stepping(self._model.eager(dtype))

    def empty(self) -> nn.Module:
        return self._stepping(self._model.empty())

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all inputs, in order."""
        positions = (POSITIONS,) if self.takes_positions else ()
        return (self.ids, self.mask, *positions, *self.past)

    @property
    def forward_signature(self) -> inspect.Signature:
        kind = inspect.Parameter.KEYWORD_ONLY
        return inspect.Signature([inspect.Parameter(name, kind) for name in self.names])

    def inputs(self) -> tuple[InputSpec, ...]:
        """`input_ids` [batch, sequence], `attention_mask` [batch, total], `position_ids`
        [batch, sequence] and the keys and values [batch, heads, past, width] of each layer, where
        total is past + sequence.  There may be no past.

        Raises:
            UsageError: the config has no vocabulary.
        """
        high = None if self.config is None else largest_id(self.config)
        if self.config is None or high is None:
            raise UsageError(f"{self.name}: the config does not say how large the vocabulary is")
        limit = limit_of(self.config)
        most = limit or SEQUENCE_WITHOUT_LIMIT
        past, sequence = tokens_before_and_new(self.name, most)
        cap = {} if limit is None else {"cap": limit}
        total = DimSpec.sum_of(TOTAL, (past, sequence), **cap)
        specs = [
            InputSpec(
                *(IDS, "token_ids", torch.int64, (batch(), sequence), 0, high),
                *(self.padding, next(iter(self.endings), None)),
            ),
            InputSpec(MASK, "attention_mask", torch.int64, (batch(), total), 0, 1),
        ]
        if self.takes_positions:
            dims = (batch(), sequence)
            specs.append(InputSpec(POSITIONS, "position_ids", torch.int64, dims, 0, most - 1))
        return with_example_sizes((*specs, *kept_inputs(self.past, self.layers, past)))

    def prompt_inputs(
        self, specs: Sequence[InputSpec], ids: Tensor, mask: Tensor
    ) -> dict[str, Tensor]:
        """The inputs for prompts without a past.

        Args:
            specs: all inputs.
            ids, mask: [batch, tokens].
        """
        known = {self.ids: ids, self.mask: mask, POSITIONS: positions_of(mask)}

        def of(spec: InputSpec) -> Tensor:
            if spec.name in known:
                return known[spec.name]
            shape = [dim.size if dim.name is None else 0 for dim in spec.dims[1:]]
            return torch.zeros(len(ids), *shape, dtype=spec.dtype)

        return {spec.name: of(spec) for spec in specs}

    def encode(
        self, prompts: Sequence[str], specs: Sequence[InputSpec]
    ) -> dict[str, Tensor] | None:
        # A step is fed other rows than a tokenizer pads.
        encoded = self._tokenized(prompts, specs, "right")
        return self.prompt_inputs(specs, encoded[self.ids], encoded[self.mask])

    def _stepping(self, module: nn.Module) -> nn.Module:
        """Make `module` take and return keys and values by name, in place.

        See `calls.take_named_tensors`.
        """
        plain: Callable[..., Any] = type(module).forward
        names, past, layers = set(self.names), self.past, len(self.layers)
        cache_name = cache_argument(type(module))

        def forward(*args: Any, **tensors: Any) -> Any:
            if args or tensors.keys() != names:
                return plain(module, *args, **tensors)  # the model's own code calls it
            kept = [tensors[name] for name in past]
            tokens = kept[0].shape[2]
            # A trace learns from these how the sizes belong together.
            for tensor in kept:
                torch._check(tensor.shape[2] == tokens, lambda: OF_CACHE)
            torch._check(tensors[MASK].shape[1] == tokens + tensors[IDS].shape[1], lambda: OF_MASK)
            cache = DynamicCache()
            cache.layers = [Kept(*pair) for pair in zip(kept[0::2], kept[1::2], strict=True)]
            given: dict[str, Any] = {
                name: tensors[name] for name in (IDS, MASK, POSITIONS) if name in names
            }
            given[cache_name] = cache
            returned = plain(module, **given, use_cache=True, return_dict=True)
            if len(cache.layers) != layers:
                raise RuntimeError(f"expected a cache of {layers} layers, got {len(cache.layers)}")
            return {
                LOGITS: returned.logits,
                PRESENT: [{"key": each.keys, "value": each.values} for each in cache.layers],
            }

        forward.__signature__ = self.forward_signature  # type: ignore[attr-defined]
        forward.__wrapped__ = plain  # type: ignore[attr-defined]
        module.forward = forward
        return module


def tokens_before_and_new(name: str, most: int) -> tuple[DimSpec, DimSpec]:
    """The tokens in the cache, of which there may be none, and the new ones.

    Args:
        name: of the model, for messages.
        most: positions that it has.

    Raises:
        UsageError: they are too few.
    """
    if most < EXAMPLE_PAST:
        raise UsageError(f"{name}: {most} positions are too few to generate text with")
    past = DimSpec(BEFORE, min(EXAMPLE_PAST, most - 1), 0, most - 1)
    return past, DimSpec(SEQUENCE, min(EXAMPLE_TOKENS, most), 1, most)


def kept_inputs(
    names: Sequence[str], layers: Sequence[Layer], tokens: DimSpec
) -> Iterator[InputSpec]:
    """The inputs that hold keys and values, [batch, heads, tokens, width] each."""
    widths = [(layer.heads, width) for layer in layers for width in layer.widths().values()]
    for name, (heads, width) in zip(names, widths, strict=True):
        dims = (batch(), DimSpec.static(heads), tokens, DimSpec.static(width))
        yield InputSpec(name, "tensor", torch.float32, dims)


def as_decoder(source: Source, task: str) -> DecoderSource:
    """The model of a source as a step of `generate`.

    Raises:
        UsageError: the task is unknown, or the model is none that transformers generates text with.
    """
    check_task(source, task)
    known = source.model_class
    headed = AutoModelForCausalLM._model_mapping.get(type(source.config), None)
    if headed is not None and not generates(known):
        source.take_class(headed)
        known = source.model_class
    require_generating(source, task, known, "generate", hint="a ...ForCausalLM")
    return DecoderSource(source)


def check_task(source: Source, task: str) -> None:
    """Refuse a task that is unknown, and a model whose inputs somebody else knows.

    Raises:
        UsageError: it is.
    """
    if task not in TASKS:
        raise UsageError(f"task {task}: expected {' or '.join(TASKS)}")
    if source.example() or source.recorded:
        raise UsageError(
            f"--kv-cache does not fit {source.name}, which comes with example inputs",
            hint="The task knows its inputs: return the module alone.",
        )


def require_generating(
    source: Source,
    task: str,
    known: type[nn.Module] | None,
    what: str,
    hint: str,
    lacking: Sequence[str] = (),
) -> None:
    """Refuse a class that is none that transformers generates text with.

    Args:
        known: the class.
        what: it should have.
        hint: a class that does.
        lacking: arguments of its `forward` that it has not.

    Raises:
        UsageError: it is none.
    """
    if generates(known) and not lacking:
        return
    kind = getattr(known, "__name__", "a program")
    without = f" without {', '.join(lacking)}" if generates(known) else ""
    raise UsageError(
        f"--kv-cache does not fit {source.name}: expected a model of transformers with {what},"
        f" got {kind}{without}",
        hint=f"Give a folder or a factory of {hint}.",
    )


def generates(known: type[nn.Module] | None) -> bool:
    """Whether a class of transformers has `generate`."""
    can = getattr(known, "can_generate", None)
    return can is not None and bool(can())


def require_keys_and_values(name: str, config: Any, hint: str) -> None:
    """Refuse a model whose cache holds more than keys and values, as the states of convolutions,
    Mamba and linear attention.

    Args:
        name: of the model.
        config: of the model; None: unknown.
        hint: what to do where it holds more.

    Raises:
        SourceError: it does.
    """
    try:
        layers = [] if config is None else DynamicCache(config=config).layers
    except Exception:  # a config that transformers cannot read: a run tells what the layers keep
        return
    for index, layer in enumerate(layers):
        kinds = [base.__name__ for base in type(layer).__mro__]
        if not isinstance(layer, DynamicLayer) or any("Linear" in kind for kind in kinds):
            raise SourceError(
                f"{name}: layer {index} keeps a state of its own ({kinds[0]}), as convolutions,"
                " Mamba and linear attention do; --kv-cache takes caches of keys and values alone",
                hint=hint,
            )


def kept_layers(name: str, layers: Iterable[Any], tokens: int, hint: str) -> tuple[Layer, ...]:
    """What the layers of a cache keep of so many tokens of one text.

    Args:
        name: of the model.
        hint: what to do where they keep something else.

    Raises:
        SourceError: one keeps something else than keys and values.
    """
    found = []
    for index, layer in enumerate(layers):
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        is_plain = type(layer) is DynamicLayer and all(
            isinstance(t, Tensor) and t.ndim == 4 and t.shape[::2] == (1, tokens)
            for t in (keys, values)
        )
        if not is_plain:
            raise SourceError(
                f"{name}: layer {index} keeps something else than keys and values"
                " [batch, heads, tokens, width]",
                hint=hint,
            )
        assert isinstance(keys, Tensor)
        assert isinstance(values, Tensor)
        found.append(Layer(keys.shape[1], keys.shape[3], values.shape[3]))
    return tuple(found)


@contextmanager
def without_values(name: str, what: str, module: nn.Module, hint: str) -> Iterator[None]:
    """Let a module run without values, which tells what its layers keep.

    Args:
        name: of the model.
        what: that which runs, for messages.
        hint: what to do where it does not run.

    Raises:
        SourceError: it does not.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fake_weights(module, mode)
    try:
        with torch.no_grad(), quiet_torch(), quiet_transformers(), mode:
            yield
    except SourceError:
        raise
    except Exception as error:  # the model's own code
        raise SourceError(
            f"{name}: {what} does not run with a cache of keys and values alone:"
            f" {type(error).__name__}: {error}",
            hint=hint,
        ) from error


def require_tokens_after_others(name: str, call: Callable[[Tensor], object], hint: str) -> None:
    """Refuse a model that reads one token alone once there are some in its cache: the engine is one
    program for prompts and for tokens after them.

    Args:
        name: of the model.
        call: runs it on two tokens after two others, with their mask [1, 4].
        hint: what to do where it does not read them.

    Raises:
        SourceError: it does not read them.
    """
    try:
        call(torch.ones(1, 4, dtype=torch.int64))
    except NEEDS_VALUES:
        return
    except Exception as error:  # the model's own code
        raise SourceError(
            f"{name}: expected a model that reads several tokens after those in its cache, got"
            f" {type(error).__name__}: {first_line(error)}",
            hint=hint,
        ) from error
