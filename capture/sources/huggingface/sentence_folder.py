"""sentence-transformers folders: a transformer, and the layers that turn its tokens into one
vector.

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
from typing import Annotated, Any, TypeVar

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from enginecast.capture.sources.base.source import Source, elements_of
from enginecast.capture.sources.base.wrapped import WrappedSource
from enginecast.capture.sources.huggingface.component_options import DEFAULTS, ComponentOptions
from enginecast.capture.sources.huggingface.hub import model_name
from enginecast.capture.sources.huggingface.transformers_folder import (
    CONFIG_FILE,
    HuggingFaceSource,
    open_folder,
)
from enginecast.capture.sources.weights.checkpoint import read_json, read_weights, sha256_of_weights
from enginecast.capture.sources.weights.empty import parameters_on_meta
from enginecast.capture.sources.weights.finite import require_finite
from enginecast.errors import SourceError

MODULES_FILE = "modules.json"
PACKAGE = "sentence_transformers."
"""Modules of other packages are code that their authors wrote, whatever they are called."""
TRANSFORMER_FILES = tuple(
    f"sentence_{kind}_config.json"
    for kind in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
"""How the transformer's settings were called over the years; the first that exists counts."""
PROMPTS_FILE = "config_sentence_transformers.json"
TRUNCATED = "truncate_dim"
TOKENIZER_CONFIG = "tokenizer_config.json"
UNLIMITED = 10**9
"""What transformers writes for no limit is far above."""
EMBEDDING = "sentence_embedding"
HIDDEN = "last_hidden_state"
LARGEST = 2**31 - 1
"""Features of a layer at most."""
HEAD = "sentence"
"""Name of the submodule that the parts after the transformer become."""
_TINY = 1e-9
"""What sentence-transformers divides by where a text has no tokens."""


class _UnknownPartError(Exception):
    """A part that does more than is known here; says what."""


Features = Annotated[int, msgspec.Meta(ge=1, le=LARGEST)]


class _Dense(msgspec.Struct):
    """The config of a `Dense`."""

    in_features: Features
    out_features: Features
    bias: bool = True
    activation_function: str = "torch.nn.Tanh"
    use_residual: bool = False


class _LayerNorm(msgspec.Struct):
    """The config of a `LayerNorm`."""

    dimension: Features


class _Module(msgspec.Struct):
    """An entry of `modules.json`."""

    type: str
    path: str


class _Whole(msgspec.Struct):
    """What a folder says of `SentenceTransformer` itself."""

    truncate_dim: Features | None = None
    default_prompt_name: str | None = None
    prompts: Any = None


Config = TypeVar("Config")


def _decoded(kind: type[Config], content: object, file: Path) -> Config:
    """The content of a config.

    Raises:
        SourceError: a field cannot be used.
    """
    try:
        return msgspec.convert(content, kind)
    except msgspec.ValidationError as error:
        problem, _, place = str(error).partition(" - at `$")
        where = place.strip("`.")
        found = content.get(where) if isinstance(content, Mapping) and where else None
        said = f"{where}: {problem[0].lower()}{problem[1:]}" if where else problem
        got = "" if found is None or "got" in problem else f", got {found!r}"
        raise SourceError(f"{file}: {said}{got}") from error


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

    def __init__(self, config: _Dense, activation: nn.Module) -> None:
        super().__init__()
        self.width, out = config.in_features, config.out_features
        self.linear = nn.Linear(self.width, out, bias=config.bias)
        self.activation = activation
        self.use_residual = config.use_residual
        if self.use_residual and self.width != out:
            self.residual = nn.Linear(self.width, out, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.activation(self.linear(x))
        if not self.use_residual:
            return found
        return found + (self.residual(x) if hasattr(self, "residual") else x)


class LayerNorm(nn.Module):
    def __init__(self, config: _LayerNorm) -> None:
        super().__init__()
        self.width = config.dimension
        self.norm = nn.LayerNorm(self.width)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.norm(x)
        return found


class Normalize(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(x, p=2, dim=-1)


class Head(nn.Module):
    """What follows the transformer: pooling, then any number of layers.

    Args:
        parts: of the folder.
        truncated: how many features are kept, from the first one on; None: all.
    """

    def __init__(self, parts: Sequence["_Part"], truncated: int | None = None) -> None:
        super().__init__()
        self.truncated = truncated
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
        found: Tensor = self.pooling(tokens, mask)
        for place, layer in enumerate(self.layers):
            width = getattr(layer, "width", found.shape[-1])
            if width != found.shape[-1]:
                raise SourceError(
                    f"{MODULES_FILE}: {type(layer).__name__} {place} after pooling: its config says"
                    f" {width} features, and it gets {found.shape[-1]}"
                )
            found = layer(found)
        return found if self.truncated is None else found[..., : self.truncated]


@dataclass(frozen=True)
class _Part:
    """An entry of `modules.json`."""

    kind: str
    """Name of its class: "Pooling" for one of sentence-transformers, else with its package."""
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
    settings = _settings(parts[0].folder)
    # Settings by which the transformer gives something else than its last hidden states.
    unknown_settings = []
    if settings.get("transformer_task", TASK) != TASK:
        unknown_settings.append("transformer_task")
    text = {"method": "forward", "method_output_name": "last_hidden_state"}
    modalities = settings.get("modality_config", {"text": text})
    if not isinstance(modalities, dict) or modalities.get("text") != text:
        unknown_settings.append("modality_config")
    if settings.get("module_output_name", "token_embeddings") != "token_embeddings":
        unknown_settings.append("module_output_name")
    for key in ("model_args", "model_kwargs", "config_args", "config_kwargs"):
        given = settings.get(key) or {}
        if not isinstance(given, dict) or not HARMLESS.issuperset(given):
            unknown_settings.append(key)
    model = open_folder(
        parts[0].folder, random_weights, component, bare="transformer_task" not in unknown_settings
    )
    model.name = model_name(folder)
    try:
        if unknown_settings:
            raise _UnknownPartError(f"Transformer with {', '.join(unknown_settings)} is not known")
        return SentenceSource(folder, model, parts[1:], settings)
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
    found = []
    for place, module in enumerate(_decoded(list[_Module], entries, file)):
        if "\0" in module.path:
            raise SourceError(f"{file}: [{place}].path: {module.path!r} is not a path")
        own = (folder / module.path).resolve()
        if not own.is_relative_to(folder.resolve()):
            raise SourceError(f"{file}: [{place}].path: {module.path!r} is outside the folder")
        has_config = place > 0 and (own / CONFIG_FILE).is_file()
        config = read_json(own / CONFIG_FILE) if has_config else {}
        is_ours = module.type.startswith(PACKAGE)
        kind = module.type.rpartition(".")[2] if is_ours else module.type
        found.append(_Part(kind, folder / module.path, config))
    return found


class SentenceSource(WrappedSource):
    """The transformer of a folder, and after it pooling, projections and normalization."""

    def __init__(
        self,
        folder: Path,
        model: HuggingFaceSource,
        parts: Sequence[_Part],
        settings: Mapping[str, Any],
    ) -> None:
        super().__init__(model)
        self.folder: Path = folder
        self._transformer = model
        self.transformer_folder = model.folder
        self._parts = [part for part in parts if part.kind != "Dropout"]
        _require_known(self._parts)
        self._truncated = _whole_config(folder).truncate_dim
        with parameters_on_meta():
            self._stored = Head(
                self._parts, self._truncated
            ).state_dict()  # on meta: names and shapes
        # Tokens at which texts are cut; 6.0 has it in the tokenizer's config.
        file = model.folder / TOKENIZER_CONFIG
        tokenizer = read_json(file) if file.is_file() else {}
        given = settings.get("max_seq_length") or tokenizer.get("model_max_length")
        self.longest_text = given if type(given) is int and 0 < given < UNLIMITED else None
        self.notes = (*model.notes, *_notes(folder, settings))

    @cached_property
    def _fingerprint(self) -> Mapping[str, str]:
        digest = hashlib.sha256()
        if self._truncated is not None:
            digest.update(f"{TRUNCATED}={self._truncated}".encode())
        for part in self._parts:
            digest.update(json.dumps([part.kind, dict(part.config)], sort_keys=True).encode())
            if part.kind in STORED and not self.in_memory:
                weights, lost = sha256_of_weights(part.folder)
                digest.update(weights.encode())
                for name, each in lost.items():
                    require_finite(each, f"{part.folder}: {name}", is_buffer=False)
        return {**self._model.fingerprint(), MODULES_FILE: digest.hexdigest()}

    def eager(self, dtype: torch.dtype = torch.float32) -> nn.Module:
        head = Head(self._parts, self._truncated)
        stored = self._head_weights
        head.load_state_dict({name: stored[name] for name in self._stored})
        return _with_head(self._model.eager(dtype), head.to(dtype))

    def empty(self) -> nn.Module:
        with parameters_on_meta():
            head = Head(self._parts, self._truncated)
        return _with_head(self._model.empty(), head)

    def weights(self) -> dict[str, Tensor]:
        own = {f"{HEAD}.{name}": tensor for name, tensor in self._head_weights.items()}
        return {**self._model.weights(), **own}

    def weight_elements(self) -> dict[torch.dtype, int]:
        counts = Counter(self._model.weight_elements())
        return dict(counts + Counter(elements_of(self._head_weights.values())))

    @cached_property
    def _head_weights(self) -> Mapping[str, Tensor]:
        """Of the layers after pooling, by their names in `Head`."""
        if self._transformer.seed is not None:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(self._transformer.seed)
                return Head(self._parts, self._truncated).state_dict()
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
        raise _UnknownPartError(f"expected a Pooling after the Transformer, got {got}")
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
    file = part.folder / CONFIG_FILE
    if part.kind == "Dense":
        config = _decoded(_Dense, part.config, file)
        # An activation of torch by its full name; classes of other packages would be code to run.
        name = config.activation_function
        kind: Any = (
            getattr(nn, name.rpartition(".")[2], None) if name.startswith("torch.nn.") else None
        )
        made = None
        try:
            made = kind()
            fits = made(torch.ones(1, 2, device="cpu")).shape == (1, 2)
        except Exception:  # nn.Linear, nn.Module: they need arguments, or compute nothing
            fits = False
        if not isinstance(made, nn.Module) or not fits:
            raise SourceError(
                f"{file}: activation_function: expected an activation of torch.nn, got {name!r}"
            )
        return Dense(config, made)
    if part.kind == "LayerNorm":
        return LayerNorm(_decoded(_LayerNorm, part.config, file))
    if part.kind != "Pooling":
        return Normalize()
    if not file.is_file():
        raise SourceError(f"{file} is missing: it says how tokens are pooled")
    given = part.config.get("pooling_mode")
    if given is None:
        given = [mode for flag, mode in FLAGS.items() if part.config.get(flag)] or ["mean"]
    modes = given if isinstance(given, list) else [given]
    if not modes or any(not isinstance(mode, str) or mode not in POOLING for mode in modes):
        raise SourceError(f"{file}: pooling_mode: expected {', '.join(POOLING)}, got {given!r}")
    return Pooling(modes)


def _settings(folder: Path) -> dict[str, Any]:
    """Those of the transformer: how texts are cut, and which class it is."""
    files = (folder / name for name in TRANSFORMER_FILES)
    return next((read_json(file) for file in files if file.is_file()), {})


TASK = "feature-extraction"
HARMLESS = frozenset(
    {"add_pooling_layer", "attn_implementation", "dtype", "torch_dtype", "trust_remote_code"}
)
"""Arguments of the transformer that do not change what it computes."""


def _notes(folder: Path, settings: Mapping[str, Any]) -> list[str]:
    """What `SentenceTransformer.encode` does to texts before they are tokenized."""
    found = []
    if settings.get("do_lower_case"):
        found.append("do_lower_case: give the engine texts in lower case")
    whole, file = _whole_config(folder), folder / PROMPTS_FILE
    if whole.default_prompt_name is not None:
        texts = _decoded(dict[str, str], whole.prompts or {}, file)
        text = texts.get(whole.default_prompt_name, "")
        found.append(f"{PROMPTS_FILE}: put its default prompt {text!r} before every text")
    return found


def _whole_config(folder: Path) -> _Whole:
    file = folder / PROMPTS_FILE
    return _decoded(_Whole, read_json(file) if file.is_file() else {}, file)


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
        if HIDDEN not in result:
            raise SourceError(
                f"{MODULES_FILE}: pooling needs {HIDDEN}, and {plain.__name__} gives"
                f" {', '.join(result)}"
            )
        mask = given.get("attention_mask")
        return {**result, EMBEDDING: self.get_submodule(HEAD)(result[HIDDEN], mask)}

    forward.__signature__ = signature  # type: ignore[attr-defined]
    names = {"forward": forward, "__module__": plain.__module__, "__doc__": plain.__doc__}
    model.__class__ = type(plain.__name__, (plain,), names)
    return model
