"""What a MODEL argument may be: a folder, a config alone, a factory, a `.pt2` program, or a
TorchScript file.
"""

import inspect
import json
import shutil
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from transformers import PreTrainedConfig

from enginecast.capture.sources.calls import Call
from enginecast.capture.sources.checkpoint import read_json
from enginecast.capture.sources.component import DEFAULTS as DEFAULTS
from enginecast.capture.sources.component import ComponentOptions as ComponentOptions
from enginecast.capture.sources.hub import download_line, is_hub_name
from enginecast.capture.sources.padding_side import (
    FROM_THE_LEFT,
    Side,
    cuts_left,
    direction,
    padding_side,
)
from enginecast.capture.sources.recording import Recorded, require_one
from enginecast.errors import SourceError, UsageError

TOKENIZER_FILE = "tokenizer.json"


SCRIPTS = (".pt", ".pth", ".ts", ".torchscript", ".ckpt", ".bin")
"""Ends of the names of files that torch writes, of which those of TorchScript are models."""


class Source(ABC):
    """A model that can be captured, and the true eager model that its engine is compared with."""

    name: str
    """Short name for reports: the folder's name, or the factory as it was given."""
    config: PreTrainedConfig | None = None
    model_class: type[nn.Module] | None = None
    """Class of the model, where it is known before the model is built."""
    trained: frozenset[str] = frozenset()
    """The modules that were given in train mode; `eager` has all of them in eval mode."""
    call: Call | None = None
    """How the inputs become the arguments of `forward`; None: they are its arguments."""
    recorded: Mapping[str, Mapping[str, Tensor]] = MappingProxyType({})
    """Inputs of calls that were recorded, by the name of the call."""
    notes: tuple[str, ...] = ()
    """What a user should know of the inputs, as sentences."""
    tokenizer_files: tuple[Path, ...] = ()
    """Files that a bundle needs to tokenize prompts; empty without a tokenizer."""
    longest_text: int | None = None
    """Tokens at which a text is cut, where that is fewer than the model takes."""

    @property
    def padding_side(self) -> Side:
        """Where its tokenizer pads; on the right where its files do not say.

        Raises:
            SourceError: one of them cannot be read.
        """
        return padding_side(*self._of_tokenizer()) or "right"

    def _of_tokenizer(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """What `tokenizer_config.json` and `tokenizer.json` hold; empty without one."""
        files = {file.name: file for file in self.tokenizer_files}
        said, content = (
            read_json(files[name]) if name in files else {}
            for name in ("tokenizer_config.json", TOKENIZER_FILE)
        )
        return said, content

    @property
    def constants(self) -> Mapping[str, Any]:
        """Arguments that are the same in every call, and so no inputs of the engine."""
        return {} if self.call is None else self.call.constants

    def write_beside(self, folder: Path) -> None:
        """Write the bundle's files about the model, besides the engine: tokenizer files, config.

        The config's keys are in order, so that their order in the model's own file is of no matter.
        A `tokenizer.json` says itself where long texts are cut: its reader knows no other file.
        """
        for file in self.tokenizer_files:
            shutil.copyfile(file, folder / file.name)
        said, content = self._of_tokenizer()
        if content and cuts_left(said, content) != (direction(content, "truncation") == "left"):
            content["truncation"] = FROM_THE_LEFT if cuts_left(said, content) else None
            text = json.dumps(content, indent=1)
            (folder / TOKENIZER_FILE).write_text(text, encoding="utf-8")

    def fingerprint(self) -> dict[str, str]:
        """The model's identity: a sha256 per part ("config", "weights"), stable between runs.

        Raises:
            SourceError: a weight is infinite or NaN; all of them are read here anyway.
        """
        return dict(self._fingerprint)

    @property
    @abstractmethod
    def _fingerprint(self) -> Mapping[str, str]:
        """Computed once."""

    @abstractmethod
    def eager(self, dtype: torch.dtype = torch.float32) -> nn.Module:
        """The model as a user gets it in `dtype`: real weights, eval mode, no gradients.

        Raises:
            SourceError: the weights do not fit the architecture.
        """

    @abstractmethod
    def empty(self) -> nn.Module:
        """A fresh fp32 model whose parameters and persistent buffers are on the meta device.

        Buffers that no checkpoint stores (rotary frequencies, position ids) hold their real values.
        """

    @abstractmethod
    def weights(self) -> dict[str, Tensor]:
        """A tensor for every name in `empty().state_dict()`, in the dtype it is stored in.

        Raises:
            SourceError: tensors are missing, left over, or have another shape.
        """

    def weight_elements(self) -> dict[torch.dtype, int]:
        """How many elements of the float weights are stored in each dtype; tied ones count once."""
        return elements_of({t.data_ptr(): t for t in self.weights().values()}.values())

    @property
    def in_memory(self) -> bool:
        """Whether `weights()` makes them in memory each time, instead of mapping a file."""
        return False

    @property
    def keeps_dtypes(self) -> bool:
        """Whether `eager` and `empty` have each weight in its own dtype, whatever is asked for."""
        return False

    @property
    def maps_mixed(self) -> bool:
        """Whether `eager` reads weights from their file where it holds several dtypes."""
        return False

    @property
    @abstractmethod
    def forward_signature(self) -> inspect.Signature:
        """Signature of the model's `forward`, without self."""

    @property
    def forward_arguments(self) -> tuple[str, ...]:
        """Names of the arguments that `forward` declares, without *args and **kwargs."""
        return tuple(p.name for p in _named(self.forward_signature))

    @property
    def required_arguments(self) -> tuple[str, ...]:
        """Names of the arguments of `forward` that have no default."""
        return tuple(p.name for p in _named(self.forward_signature) if p.default is p.empty)

    @property
    def tokenized(self) -> tuple[str, ...]:
        """Names of the inputs that the model's tokenizer gives; none without one."""
        return ()

    def example(self) -> dict[str, Tensor]:
        """Example inputs that came with the model, by argument name; mostly none."""
        return {}

    def given_program(self) -> ExportedProgram | None:
        """The program, when the model is one already and needs no capture."""
        return None

    def given_script(self) -> torch.jit.ScriptModule | None:
        """The TorchScript module, when the model is one; torch.export takes none."""
        return None


def elements_of(tensors: Iterable[Tensor]) -> dict[torch.dtype, int]:
    """How many elements float tensors have in each dtype."""
    found = Counter[torch.dtype]()
    for tensor in tensors:
        if tensor.is_floating_point():
            found[tensor.dtype] += tensor.numel()
    return dict(found)


def _named(signature: inspect.Signature) -> list[inspect.Parameter]:
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p for p in signature.parameters.values() if p.kind not in variadic]


def open_source(
    model: str | nn.Module,
    *,
    random_weights: int | None = None,
    allow_code: bool = False,
    example: Mapping[str, Any] | Recorded | None = None,
    component: ComponentOptions = DEFAULTS,
) -> Source:
    """Open a MODEL argument: the one place that looks at what it is.

    Args:
        model: a Hugging Face folder, that of a component of diffusers, `package.module:factory`, a
            `.pt2` file, a file of TorchScript, or a module, of which a copy is taken.
        random_weights: seed for random weights; only for a folder that has a config and no weights.
        allow_code: whether a file may be loaded whose loading can run code.
        example: inputs by name, for a module; or recorded calls, for a folder, too.
        component: for a folder.

    Raises:
        SourceError: the model cannot be read.
        UsageError: an option does not fit the kind of model.
    """
    require_one(example)
    is_folder = isinstance(model, str) and Path(model).is_dir()
    if component.given and not is_folder:
        name = next(iter(component.given))
        raise UsageError(f"--{name} does not fit {_shown(model)}: it is for a component's folder")
    if isinstance(model, nn.Module):
        from enginecast.capture.sources.factory import take_module

        return take_module(model, example or {})
    path = Path(model)
    if is_folder:
        found = _open_folder(path, random_weights, component)
        if isinstance(example, Recorded):
            from enginecast.capture.sources.recorded import RecordedSource

            return RecordedSource(found, example)
        return found
    if random_weights is not None:
        raise UsageError(
            f"--random-weights {random_weights} does not fit {model!r}: it is for a folder with a "
            "config.json and no weights"
        )
    if path.suffix == ".pt2":
        from enginecast.capture.sources.program_file import open_program_file

        return open_program_file(path, allow_code=allow_code)
    if path.suffix in SCRIPTS and (path.is_file() or ":" not in model):
        from enginecast.capture.sources.script_file import open_script_file

        return open_script_file(path, allow_code=allow_code)
    if ":" in model and not path.exists():
        from enginecast.capture.sources.factory import open_factory

        return open_factory(model)
    if is_hub_name(model):
        raise SourceError(
            f"{model!r} is not a model here: no such folder",
            hint=f"From the Hugging Face hub: --download, or {download_line(model)}",
        )
    raise SourceError(
        f"{model!r} is not a model: "
        + ("a file of unknown kind" if path.exists() else "no such file or folder"),
        hint="Give a Hugging Face folder, package.module:factory, a .pt2 program, or a TorchScript"
        " file.",
    )


def _open_folder(folder: Path, random_weights: int | None, component: ComponentOptions) -> Source:
    if not any(folder.iterdir()):
        raise SourceError(
            f"{folder}: expected a model, but the folder is empty",
            hint="Give a Hugging Face folder: config.json, safetensors, a tokenizer.",
        )
    if _is_of_diffusers(folder):
        from enginecast.capture.sources.diffusion import open_component

        return open_component(folder, random_weights, component)
    from enginecast.capture.sources.sentence import is_sentence_folder, open_sentence_folder

    if is_sentence_folder(folder):
        return open_sentence_folder(folder, random_weights, component)
    from enginecast.capture.sources.huggingface import open_folder

    return open_folder(folder, random_weights, component)


def _shown(model: str | nn.Module) -> str:
    return model if isinstance(model, str) else type(model).__name__


def _is_of_diffusers(folder: Path) -> bool:
    """Whether diffusers wrote a folder; one whose config is broken is left to who reads it."""
    if any((folder / name).is_file() for name in ("model_index.json", "scheduler_config.json")):
        return True
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(config, dict) and "_class_name" in config
