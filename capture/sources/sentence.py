"""Folders of sentence-transformers: a transformer, and what makes one vector of its tokens.

`modules.json` lists the parts (https://sbert.net/docs/sentence_transformer/usage/custom_models.html).
The engine has the transformer's outputs and one more, `sentence_embedding` [batch, width]: what
`SentenceTransformer.encode` returns.
"""

import hashlib
import inspect
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from enginecast.capture.sources.checkpoint import read_json, read_weights, sha256_of_weights
from enginecast.capture.sources.empty import parameters_on_meta
from enginecast.capture.sources.finite import require_finite
from enginecast.capture.sources.huggingface import HuggingFaceSource, open_folder
from enginecast.capture.sources.source import DEFAULTS, ComponentOptions, Source, elements_of
from enginecast.errors import SourceError

MODULES_FILE = "modules.json"
TRANSFORMER_FILE = "sentence_bert_config.json"
PROMPTS_FILE = "config_sentence_transformers.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
UNLIMITED = 10**9
"""What transformers writes for no limit is far above."""
EMBEDDING = "sentence_embedding"
HEAD = "sentence"
"""Name of the submodule that the parts after the transformer become."""
_TINY = 1e-9
"""What sentence-transformers divides by where a text has no tokens."""


class _UnknownPartError(Exception):
    """A part that does more than is known here; says what."""


class Pooling(nn.Module):
    """One vector for each text, from those of its tokens; several modes stand side by side.

    Args:
        modes: keys of `POOLING`.
    """

    def __init__(self, modes: Sequence[str]) -> None:
        super().__init__()
        self.modes = tuple(modes)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """Pool `tokens` [batch, sequence, width] where `mask` [batch, sequence] is not 0."""
        return torch.cat([POOLING[mode](tokens, mask) for mode in self.modes], dim=-1)


def _first(tokens: Tensor, mask: Tensor) -> Tensor:
    return _row(tokens, mask.to(torch.int32).argmax(1))


def _last(tokens: Tensor, mask: Tensor) -> Tensor:
    from_the_end = mask.to(torch.int32).flip(1).argmax(1)
    is_real = (mask != 0).any(1, keepdim=True)
    return _row(tokens, tokens.shape[1] - 1 - from_the_end) * is_real.to(tokens.dtype)


def _row(tokens: Tensor, index: Tensor) -> Tensor:
    return tokens.gather(1, index[:, None, None].expand(-1, 1, tokens.shape[2])).squeeze(1)


def _largest(tokens: Tensor, mask: Tensor) -> Tensor:
    return tokens.masked_fill((mask == 0)[..., None], -torch.inf).amax(1)


def _mean(tokens: Tensor, mask: Tensor) -> Tensor:
    return _weighted(tokens, mask[..., None].to(tokens.dtype))


def _mean_of_root(tokens: Tensor, mask: Tensor) -> Tensor:
    """The sum over the square root of how many tokens there are."""
    weights = mask[..., None].to(tokens.dtype)
    total, count = _sum(tokens * weights), _sum(weights)
    return (total / count.clamp(min=_TINY).sqrt()).to(tokens.dtype)


def _mean_by_position(tokens: Tensor, mask: Tensor) -> Tensor:
    """Later tokens weigh more: 1, 2, ... from the first real one."""
    start = mask.to(torch.int32).argmax(1, keepdim=True)
    place = torch.arange(1, mask.shape[1] + 1, device=mask.device)[None, :] - start
    return _weighted(tokens, (mask * place)[..., None].to(_exact(tokens)))


def _weighted(tokens: Tensor, weights: Tensor) -> Tensor:
    total, weight = _sum(tokens * weights), _sum(weights)
    return (total / weight.clamp(min=_TINY)).to(tokens.dtype)


def _sum(values: Tensor) -> Tensor:
    return values.sum(1, dtype=_exact(values))


def _exact(values: Tensor) -> torch.dtype:
    return torch.float32 if values.dtype in (torch.float16, torch.bfloat16) else values.dtype


POOLING: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cls": _first,
    "max": _largest,
    "mean": _mean,
    "mean_sqrt_len_tokens": _mean_of_root,
    "weightedmean": _mean_by_position,
    "lasttoken": _last,
}
"""By the name that a config has, in the order in which several stand side by side."""

FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
"""How configs before sentence-transformers 5 named the modes, each true or false."""


class Dense(nn.Module):
    """A linear, and an activation; with `use_residual` its input is added."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        width, out = config["in_features"], config["out_features"]
        self.linear = nn.Linear(width, out, bias=config.get("bias", True))
        self.activation = _activation(config.get("activation_function", "torch.nn.Tanh"))
        self.use_residual = bool(config.get("use_residual"))
        if self.use_residual and width != out:
            self.residual = nn.Linear(width, out, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.activation(self.linear(x))
        if not self.use_residual:
            return found
        return found + (self.residual(x) if hasattr(self, "residual") else x)


class LayerNorm(nn.Module):
    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config["dimension"])

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.norm(x)
        return found


class Normalize(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(x, p=2, dim=-1)


class Head(nn.Module):
    """What follows the transformer: pooling, then any number of layers."""

    def __init__(self, parts: Sequence["_Part"]) -> None:
        super().__init__()
        pooling, *layers = (_made(part) for part in parts)
        self.pooling = pooling
        self.layers = nn.Sequential(*layers)

    def forward(self, tokens: Tensor, mask: Tensor | None) -> Tensor:
        """Embed texts.

        Args:
            tokens: last hidden states [batch, sequence, width].
            mask: [batch, sequence], 0 where a token is padding; None: all are real.
        """
        if mask is None:
            mask = torch.ones(tokens.shape[:2], dtype=torch.int64, device=tokens.device)
        found: Tensor = self.layers(self.pooling(tokens, mask))
        return found


@dataclass(frozen=True)
class _Part:
    """An entry of `modules.json`."""

    kind: str
    """Name of its class, without the package: "Pooling"."""
    folder: Path
    config: Mapping[str, Any]


def is_sentence_folder(folder: Path) -> bool:
    """Whether sentence-transformers wrote a folder."""
    return (folder / MODULES_FILE).is_file()


def open_sentence_folder(
    folder: Path, random_weights: int | None, component: ComponentOptions = DEFAULTS
) -> Source:
    """Open a folder of sentence-transformers.

    Where a part is not known, the source is that of the transformer alone, and a note says so.

    Raises:
        SourceError: `modules.json`, a config or weights cannot be used.
        UsageError: an option does not fit.
    """
    parts = _parts(folder)
    if not parts or parts[0].kind != "Transformer":
        first = parts[0].kind if parts else "nothing"
        raise SourceError(
            f"{folder / MODULES_FILE}: expected a Transformer as its first module, got {first}",
            hint="Write a factory that builds the model, and give package.module:factory.",
        )
    model = open_folder(parts[0].folder, random_weights, component)
    model.name = folder.resolve().name
    try:
        return SentenceSource(folder, model, parts[1:])
    except _UnknownPartError as unknown:
        model.notes = (
            *model.notes,
            f"{MODULES_FILE}: {unknown}; the engine gives the transformer's outputs, and no"
            f" {EMBEDDING}",
        )
        return model


def _parts(folder: Path) -> list[_Part]:
    file = folder / MODULES_FILE
    try:
        entries = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError, OSError) as error:
        raise SourceError(f"{file} cannot be read as JSON: {error}") from error
    if not isinstance(entries, list):
        raise SourceError(f"{file}: expected a list, got a {type(entries).__name__}")
    found = []
    for place, entry in enumerate(entries):
        kind, path = (entry.get(key) if isinstance(entry, dict) else None for key in KEYS)
        if not isinstance(kind, str) or not isinstance(path, str):
            raise SourceError(f"{file}: [{place}]: expected an object with type and path")
        own = (folder / path).resolve()
        if not own.is_relative_to(folder.resolve()):
            raise SourceError(f"{file}: [{place}].path: {path!r} is outside the folder")
        is_first = place == 0
        has_config = not is_first and (own / "config.json").is_file()
        config = read_json(own / "config.json") if has_config else {}
        found.append(_Part(kind.rpartition(".")[2], folder / path, config))
    return found


KEYS = ("type", "path")


class SentenceSource(Source):
    """The transformer of a folder, and after it pooling, projections and normalization."""

    def __init__(self, folder: Path, model: HuggingFaceSource, parts: Sequence[_Part]) -> None:
        self.folder, self._model = folder, model
        self._parts = [part for part in parts if part.kind != "Dropout"]
        _require_known(self._parts)
        self.name = model.name
        self.config = model.config
        self.model_class = model.model_class
        self.tokenizer_files = model.tokenizer_files
        with parameters_on_meta():
            self._stored = Head(self._parts).state_dict()  # on meta: names and shapes
        settings = _settings(model.folder)
        self.longest_text = _longest(model.folder, settings)
        self.notes = (*model.notes, *_notes(folder, settings))

    def write_beside(self, folder: Path) -> None:
        self._model.write_beside(folder)

    @cached_property
    def _fingerprint(self) -> Mapping[str, str]:
        digest = hashlib.sha256()
        for part in self._parts:
            digest.update(json.dumps([part.kind, dict(part.config)], sort_keys=True).encode())
            if part.kind in STORED and not self.in_memory:
                weights, lost = sha256_of_weights(part.folder)
                digest.update(weights.encode())
                for name, each in lost.items():
                    require_finite(each, f"{part.folder}: {name}", is_buffer=False)
        return {**self._model.fingerprint(), MODULES_FILE: digest.hexdigest()}

    def eager(self, dtype: torch.dtype = torch.float32) -> nn.Module:
        head = Head(self._parts)
        stored = self._head_weights
        head.load_state_dict({name: stored[name] for name in self._stored})
        return _with_head(self._model.eager(dtype), head.to(dtype))

    def empty(self) -> nn.Module:
        with parameters_on_meta():
            head = Head(self._parts)
        return _with_head(self._model.empty(), head)

    def weights(self) -> dict[str, Tensor]:
        own = {f"{HEAD}.{name}": tensor for name, tensor in self._head_weights.items()}
        return {**self._model.weights(), **own}

    def weight_elements(self) -> dict[torch.dtype, int]:
        counts = Counter(self._model.weight_elements())
        return dict(counts + Counter(elements_of(self._head_weights.values())))

    @property
    def in_memory(self) -> bool:
        return self._model.in_memory

    @property
    def maps_mixed(self) -> bool:
        return self._model.maps_mixed

    @property
    def forward_signature(self) -> inspect.Signature:
        return self._model.forward_signature

    @property
    def tokenized(self) -> tuple[str, ...]:
        return self._model.tokenized

    @cached_property
    def _head_weights(self) -> Mapping[str, Tensor]:
        """Of the layers after pooling, by their names in `Head`."""
        if self._model.seed is not None:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(self._model.seed)
                return Head(self._parts).state_dict()
        found: dict[str, Tensor] = {}
        for place, part in enumerate(self._parts[1:]):
            if part.kind in STORED:
                tensors = read_weights(part.folder)
                found.update((f"layers.{place}.{name}", t) for name, t in tensors.items())
        shapes = {name: tuple(tensor.shape) for name, tensor in self._stored.items()}
        given = {name: tuple(tensor.shape) for name, tensor in found.items()}
        if given != shapes:
            raise SourceError(
                f"{self.folder}: the weights of its projections do not fit their configs: expected"
                f" {shapes}, got {given}"
            )
        return found


STORED = ("Dense", "LayerNorm")
"""Parts that have weights."""


def _require_known(parts: Sequence[_Part]) -> None:
    """Raise _UnknownPartError unless the parts are pooling and layers after it."""
    kinds = [part.kind for part in parts]
    if kinds[:1] != ["Pooling"]:
        got = kinds[0] if kinds else "nothing"
        raise _UnknownPartError(f"a Pooling is expected after the Transformer, and {got} follows")
    known = (*STORED, "Normalize")
    for part in parts:
        if part.kind not in known and part is not parts[0]:
            raise _UnknownPartError(f"{part.kind} is not known")
        for key in ("module_input_name", "module_output_name"):
            if part.config.get(key) not in (None, EMBEDDING):
                raise _UnknownPartError(f"{part.kind} with {key} {part.config[key]!r} is not known")
    if not parts[0].config.get("include_prompt", True):
        raise _UnknownPartError("Pooling leaves out the prompt, whose length no input has")


def _made(part: _Part) -> nn.Module:
    try:
        if part.kind == "Pooling":
            return Pooling(_modes(part))
        if part.kind == "Dense":
            return Dense(part.config)
        return LayerNorm(part.config) if part.kind == "LayerNorm" else Normalize()
    except KeyError as error:
        raise SourceError(f"{part.folder / 'config.json'}: {error.args[0]} is missing") from error


def _modes(part: _Part) -> tuple[str, ...]:
    given = part.config.get("pooling_mode")
    if given is None:
        given = [mode for flag, mode in FLAGS.items() if part.config.get(flag)] or ["mean"]
    modes = (given,) if isinstance(given, str) else tuple(given)
    for mode in modes:
        if mode not in POOLING:
            raise SourceError(
                f"{part.folder / 'config.json'}: pooling_mode: expected {', '.join(POOLING)},"
                f" got {mode!r}"
            )
    return modes


def _activation(name: str) -> nn.Module:
    """An activation of torch by its full name; classes of other packages would be code to run."""
    found = getattr(nn, name.rpartition(".")[2], None) if name.startswith("torch.nn.") else None
    if not (isinstance(found, type) and issubclass(found, nn.Module)):
        raise SourceError(f"activation_function: expected a class of torch.nn, got {name!r}")
    return found()


def _settings(folder: Path) -> dict[str, Any]:
    file = folder / TRANSFORMER_FILE
    return read_json(file) if file.is_file() else {}


def _longest(folder: Path, settings: Mapping[str, Any]) -> int | None:
    """Tokens at which texts are cut; 6.0 has it in the tokenizer's config."""
    file = folder / TOKENIZER_CONFIG
    tokenizer = read_json(file) if file.is_file() else {}
    given = settings.get("max_seq_length") or tokenizer.get("model_max_length")
    return given if isinstance(given, int) and 0 < given < UNLIMITED else None


def _notes(folder: Path, settings: Mapping[str, Any]) -> list[str]:
    """What `SentenceTransformer.encode` does to texts before they are tokenized."""
    found = []
    if settings.get("do_lower_case"):
        found.append(f"{TRANSFORMER_FILE}: give the engine texts in lower case")
    prompts = read_json(folder / PROMPTS_FILE) if (folder / PROMPTS_FILE).is_file() else {}
    name = prompts.get("default_prompt_name")
    if name is not None:
        text = (prompts.get("prompts") or {}).get(name, "")
        found.append(f"{PROMPTS_FILE}: put its default prompt {text!r} before every text")
    return found


def _with_head(model: nn.Module, head: nn.Module) -> nn.Module:
    """Let `model` give the embedding besides its outputs, in place.

    Wrapping it instead would put a prefix before every module path in the program.
    """
    plain = type(model)
    model.add_module(HEAD, head.eval().requires_grad_(False))
    signature = inspect.signature(plain.forward)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> dict[str, Any]:
        given = signature.bind(self, *args, **kwargs).arguments
        result = dict(plain.forward(self, *args, **kwargs))
        mask = given.get("attention_mask")
        return {**result, EMBEDDING: self.get_submodule(HEAD)(result["last_hidden_state"], mask)}

    forward.__signature__ = signature  # type: ignore[attr-defined]
    names = {"forward": forward, "__module__": plain.__module__, "__doc__": plain.__doc__}
    model.__class__ = type(plain.__name__, (plain,), names)
    return model
