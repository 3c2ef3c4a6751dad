"""Hugging Face folders: config.json with safetensors weights, or with seeded random weights."""

import copy
import hashlib
import importlib.util
import inspect
import json
import logging
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
)

from enginecast.capture.inputs.text_config import parts_of
from enginecast.capture.python.quiet import quiet_transformers
from enginecast.capture.sources.base.source import Source, elements_of
from enginecast.capture.sources.huggingface.component_options import DEFAULTS, ComponentOptions
from enginecast.capture.sources.huggingface.hub import model_name
from enginecast.capture.sources.huggingface.quantized_folder import KEY, is_in_fp8, stored_in
from enginecast.capture.sources.huggingface.single_file import of_encoder
from enginecast.capture.sources.huggingface.text_encoders import TEXT_ENCODERS
from enginecast.capture.sources.weights.checkpoint import (
    GGUF,
    NAMES,
    Checkpoint,
    WeightNames,
    find_weight_files,
    name_weights,
    read_json,
    sha256_of_weights,
    weights_file,
)
from enginecast.capture.sources.weights.empty import buffers_to_meta, parameters_on_meta
from enginecast.capture.sources.weights.finite import Lost, require_finite
from enginecast.capture.sources.weights.gguf_file import stored_gguf
from enginecast.capture.sources.weights.published import Scales, Stored
from enginecast.capture.sources.weights.widened import NARROW, fill_widened
from enginecast.errors import SourceError, UsageError

DROPPED = ("decoder.", "lm_head.")
"""What a checkpoint of theirs holds besides the encoder."""

BESIDE = (
    *("logit_scale", "text_projection.", "visual_projection.", "multi_modal_projector."),
    *("vision_model.", "vision_tower.", "visual."),
)
"""What a single file may hold besides the class of the config, which has its own encoder of texts
alone."""

CONFIG_FILE = "config.json"
POOLER = "pooler."
POOLING_OPTION = "add_pooling_layer"
logger = logging.getLogger(__name__)

TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
    "chat_template.jinja",
)
VOCABULARY_FILE = "vocab.txt"
"""All that the folder of an old BERT has of its tokenizer."""
TYPES = "token_type_ids"


class HuggingFaceSource(Source):
    """A folder with config.json and weights, or with config.json and a seed for random weights."""

    def __init__(
        self,
        folder: Path,
        config: PreTrainedConfig,
        seed: int | None,
        names: WeightNames = NAMES,
        *,
        bare: bool = False,
    ) -> None:
        self.name = Path(names.single).stem if names.is_alone else model_name(folder)
        self.names = names
        self.folder: Path = folder
        self.config: PreTrainedConfig = config
        self.seed = seed
        self._bare = bare
        self.model_class: type[PreTrainedModel] = find_model_class(config, folder)
        files = (folder / name for name in TOKENIZER_FILES)
        self.tokenizer_files = tuple(file for file in files if file.is_file())
        dropped = DROPPED if config.model_type in TEXT_ENCODERS or names.is_alone else ()
        self._dropped: tuple[str, ...] = (*dropped, *(BESIDE if names.is_alone else ()))

    def take_class(self, model_class: type[PreTrainedModel]) -> None:
        """Load the model as another class, all of it, before anything was loaded."""
        self.model_class, self._dropped = model_class, ()

    def write_beside(self, folder: Path) -> None:
        super().write_beside(folder)
        write_config(read_json(self.folder / CONFIG_FILE), folder)

    @cached_property
    def _fingerprint(self) -> Mapping[str, str]:
        config = read_json(self.folder / CONFIG_FILE)
        canonical = json.dumps(config, sort_keys=True).encode()
        if self.seed is not None:
            weights = {"random_weights": str(self.seed)}
        else:
            digest, lost = sha256_of_weights(self.folder, self.names)
            self._require_finite(lost)
            weights = {"weights": digest}
        if self.names.variant:
            weights["variant"] = self.names.variant
        return {"config": hashlib.sha256(canonical).hexdigest(), **weights}

    def _require_finite(self, lost: Mapping[str, Lost]) -> None:
        """Refuse weights that are not numbers, but not in what the class leaves out."""
        if not lost:
            return
        names = {tensor.data_ptr(): name for name, tensor in self._named.items()}
        buffers = {name for name, _ in self.empty().named_buffers()}
        for name, each in lost.items():
            if not name.startswith(self._dropped) and name in self._tensors:
                own = names.get(self._tensors[name].data_ptr(), "")
                what = f"{weights_file(self.folder, name, self.names)}: {name}"
                require_finite(each, what, is_buffer=own in buffers)

    def eager(self, dtype: torch.dtype = torch.float32) -> nn.Module:
        weights = self.weights()  # transformers only warns of missing tensors, and draws them
        stored = [*self.weight_elements()]
        if dtype == torch.float32 and len(stored) == 1 and stored[0] in NARROW:
            return fill_widened(self.empty(), weights)
        with quiet_transformers():
            model = self.model_class.from_pretrained(
                None,
                config=self._fresh_config(),
                dtype=dtype,
                state_dict=dict(weights if self.in_memory else self._tensors),
                **self._options,
            )
        return self._frozen(model)

    def empty(self) -> nn.Module:
        with parameters_on_meta():
            model = self._construct()
        return buffers_to_meta(self._frozen(model))

    def weights(self) -> dict[str, Tensor]:
        if self.seed is not None:
            return dict(self._construct(self.seed).state_dict())
        return dict(self._named)

    @cached_property
    def stored(self) -> Stored:
        """What the files hold, mapped once: pages of a second mapping would count as memory."""
        if self.names.single.endswith(GGUF):
            return stored_gguf(Path(self.names.single), self.empty())
        if self.in_memory:
            return Stored({})
        config = read_json(self.folder / CONFIG_FILE)
        return stored_in(self.folder, self.names, config, self.model_class)

    @cached_property
    def _tensors(self) -> Mapping[str, Tensor]:
        return self._own(self.stored.tensors)

    def _own(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return of_encoder(tensors, self._class_names) if self.names.is_alone else tensors

    @cached_property
    def _class_names(self) -> tuple[str, ...]:
        return tuple(self.empty().state_dict())

    @cached_property
    def _named(self) -> Mapping[str, Tensor]:
        return self._by_name(self._tensors)

    def scales(self) -> Scales:
        return self.stored.scales_by(lambda scales: self._by_name(self._own(scales)))

    def _by_name(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        checkpoint = Checkpoint(
            folder=self.folder,
            model_class=self.model_class,
            config=self._fresh_config(),
            tensors=tensors,
            options=self._options,
            dropped=self._dropped,
            names=self.names,
        )
        with quiet_transformers():
            return name_weights(checkpoint, self.empty().state_dict())

    @property
    def forward_signature(self) -> inspect.Signature:
        signature = inspect.signature(self.model_class.forward)
        return signature.replace(parameters=list(signature.parameters.values())[1:])

    @cached_property
    def tokenized(self) -> tuple[str, ...]:
        has_one = self.tokenizer_files or (self.folder / VOCABULARY_FILE).is_file()
        if not has_one or TYPES not in self.forward_arguments:
            return ()  # all others give the inputs that are derived anyway
        try:
            with quiet_transformers():
                tokenizer = AutoTokenizer.from_pretrained(self.folder, local_files_only=True)
        except Exception as error:  # transformers raises any kind; the model needs no tokenizer
            logger.debug("the tokenizer of %s cannot be opened: %s", self.folder, error)
            return ()
        return tuple(tokenizer.model_input_names)

    def weight_elements(self) -> dict[torch.dtype, int]:
        return dict(self._elements)

    @property
    def left_out(self) -> Mapping[str, str]:
        config = self.config
        decodes = getattr(config, "is_encoder_decoder", False) or getattr(
            config, "is_decoder", True
        )
        asks = read_json(self.folder / CONFIG_FILE).get("use_cache", True)
        # `read_config` switches the cache off.
        if asks and decodes and hasattr(config, "use_cache") and self.model_class.can_generate():
            return {"the KV cache": "--kv-cache"}
        return {}

    @property
    def in_memory(self) -> bool:
        return self.seed is not None

    @cached_property
    def _elements(self) -> Mapping[torch.dtype, int]:
        """From the headers of the files, or of a model without memory."""
        tensors = self.empty().state_dict() if self.in_memory else self._tensors
        return elements_of(t for name, t in tensors.items() if not name.startswith(self._dropped))

    @cached_property
    def _options(self) -> dict[str, Any]:
        has_sdpa = getattr(self.model_class, "_supports_sdpa", False)
        # "" is the model itself: a part that has no sdpa, such as a ResNet backbone, takes its own.
        found = {"attn_implementation": {"": "sdpa"} if has_sdpa else "eager"}
        if not self._bare or self.in_memory or any(POOLER in name for name in self._tensors):
            return found
        # Checkpoints of masked language models have none, and nobody reads its output.
        has_pooler = POOLING_OPTION in inspect.signature(self.model_class.__init__).parameters
        return {**found, POOLING_OPTION: False} if has_pooler else found

    def _fresh_config(self) -> PreTrainedConfig:
        """A copy: transformers writes the dtype and attention of each load into the config."""
        return copy.deepcopy(self.config)

    def _construct(self, seed: int = 0) -> PreTrainedModel:
        with torch.random.fork_rng(devices=[]):  # the caller's random numbers stay what they were
            torch.manual_seed(seed)
            return self.model_class._from_config(
                self._fresh_config(), dtype=torch.float32, **self._options
            )

    def _frozen(self, model: nn.Module) -> nn.Module:
        model.eval().requires_grad_(False)
        assert not any(module.training for module in model.modules())
        refuse_apex(model, self.name)
        return model


def open_folder(
    folder: Path,
    random_weights: int | None,
    component: ComponentOptions = DEFAULTS,
    *,
    bare: bool = False,
) -> HuggingFaceSource:
    """Open a Hugging Face folder.

    Args:
        bare: the model without the head that config.json may name, as AutoModel loads it, and
            without a pooler that was not saved; it returns its outputs by name.

    Raises:
        SourceError: config.json or the weights cannot be used.
        UsageError: a seed for random weights where the folder has weights.
    """
    sizes = [name for name in component.given if name != "variant"]
    if sizes:
        raise UsageError(
            f"--{sizes[0]} does not fit {folder}: it is for a component of diffusers",
            hint="Set this model's input sizes with --dynamic.",
        )
    config = read_config(folder)
    if bare:
        config.architectures, config.return_dict = None, True
    names = WeightNames.asked("model", component.variant, component.single_file)
    require_weights(folder, names, random_weights)
    return HuggingFaceSource(folder, config, random_weights, names, bare=bare)


def write_config(config: Mapping[str, Any], folder: Path) -> None:
    """Write a config into a folder, its keys in order."""
    text = json.dumps(config, sort_keys=True, indent=2, ensure_ascii=False)
    (folder / CONFIG_FILE).write_text(f"{text}\n", encoding="utf-8")


def require_weights(folder: Path, names: WeightNames, random_weights: int | None) -> None:
    """Refuse a folder that has neither weights nor a seed for random ones, or both.

    Raises:
        SourceError: it has no weights, or none that can be read.
        UsageError: it has weights, and a seed was given.
    """
    files = find_weight_files(folder, names)
    if files and random_weights is not None:
        raise UsageError(
            f"--random-weights {random_weights} does not fit {folder}: it has {files[0].name}",
            hint="Leave the option out, or copy config.json alone into another folder.",
        )
    if not files and random_weights is None:
        raise SourceError(
            f"{folder} has a config.json and no weights ({names.single})",
            hint="Add the weights, or give --random-weights SEED.",
        )


def read_config(folder: Path) -> PreTrainedConfig:
    """Read config.json, with caches of the decoder kind switched off.

    Raises:
        SourceError: it is missing, broken, of an unknown model_type, or wants code of its own.
    """
    file = folder / CONFIG_FILE
    raw = read_json(file)
    if "auto_map" in raw:
        raise SourceError(
            f"{file}: auto_map: the model needs code from its own repository, which is not run",
            hint="Write a factory that builds the model, and give package.module:factory.",
        )
    if raw.get(KEY) is not None:
        is_in_fp8(raw, file)  # or a library is there
    try:
        with without_apex():
            config = AutoConfig.from_pretrained(
                folder, trust_remote_code=False, local_files_only=True
            )
    except Exception as error:  # transformers raises what its config classes raise: any kind
        first = str(error).strip().partition("\n")[0]
        raise SourceError(f"{file}: {first or type(error).__name__}") from error
    if raw.get(KEY) is not None:
        del config.quantization_config  # weights are given dequantized
    for part in parts_of(config):
        if hasattr(part, "use_cache"):
            part.use_cache = False  # a cache in the output is not a tensor and cannot be exported
    return config


def find_model_class(config: PreTrainedConfig, folder: Path) -> type[PreTrainedModel]:
    """The class to load: the text encoder of T5 kinds, else the one that config.json names.

    Raises:
        SourceError: transformers has no class for this config.
    """
    encoder = TEXT_ENCODERS.get(config.model_type)
    names = [encoder] if encoder else [*(config.architectures or ())]
    with without_apex():
        for name in names:
            found = getattr(transformers, name, None) or _beside_config(config, name)
            if isinstance(found, type) and issubclass(found, PreTrainedModel):
                return found
        fallback = AutoModel._model_mapping.get(type(config), None)
    if fallback is None:
        raise SourceError(
            f"{folder / 'config.json'}: transformers {transformers.__version__} has no model "
            f"class for model_type {config.model_type!r}, architectures {config.architectures}"
        )
    chosen: type[PreTrainedModel] = fallback[0] if isinstance(fallback, tuple) else fallback
    return chosen


def _beside_config(config: PreTrainedConfig, name: str) -> object:
    """A class that transformers keeps to itself, as WhisperEncoder: its module is the config's."""
    place = type(config).__module__.replace(".configuration_", ".modeling_")
    if importlib.util.find_spec(place) is None:
        return None
    return getattr(importlib.import_module(place), name, None)


@contextmanager
def without_apex() -> Iterator[None]:
    """Make `import apex` fail as if it were not installed, for the imports in the block.

    Releases of transformers before huggingface/transformers#45723 (May 2026) replace T5LayerNorm by
    FusedRMSNorm of apex as they import T5, when apex is installed. torch.export cannot trace that
    (pytorch/pytorch#138196), and it needs a GPU.
    """
    absent = object()
    before: ModuleType | object | None = sys.modules.get("apex", absent)
    hidden = {name: m for name, m in sys.modules.items() if name.startswith("apex.")}
    for name in hidden:
        del sys.modules[name]
    sys.modules["apex"] = None  # type: ignore[assignment] # Python's way to say: cannot be imported
    try:
        yield
    finally:
        del sys.modules["apex"]
        sys.modules.update(hidden)
        if before is not absent:
            sys.modules["apex"] = before  # type: ignore[assignment] # None, if somebody hid it


def refuse_apex(module: nn.Module, name: str) -> None:
    """Raise SourceError when `module` was built from classes that apex had replaced already."""
    for path, part in module.named_modules():
        if type(part).__module__.split(".")[0] == "apex":
            raise SourceError(
                f"{name}: {path} is apex' {type(part).__name__}, which cannot be captured",
                hint="Open the model before anything else imports its transformers module, "
                "or uninstall apex.",
            )
