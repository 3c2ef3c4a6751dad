"""A model that can be captured: what every kind of MODEL answers."""

import inspect
import json
import shutil
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from transformers import PreTrainedConfig

from enginecast.capture.inputs.calls import Call
from enginecast.capture.inputs.derive.diffusion import ONE_BY_ONE
from enginecast.capture.inputs.derive.from_facts import from_facts
from enginecast.capture.inputs.derive.model_facts import ModelFacts, documented
from enginecast.capture.inputs.given import DynamicOption
from enginecast.capture.inputs.specs import InputSpec, from_example
from enginecast.capture.sources.base.padding_side import (
    FROM_THE_LEFT,
    Side,
    cuts_left,
    direction,
    padding_side,
)
from enginecast.capture.sources.weights.checkpoint import read_json
from enginecast.capture.sources.weights.published import Scales, Stored
from enginecast.errors import BundleError, SourceError, UsageError
from enginecast.runtime.bundle.manifest import TextForm
from enginecast.runtime.prompts import PLAIN, open_tokenizer, pad, tokenize

TOKENIZER_FILE = "tokenizer.json"


class Source(ABC):
    """A model that can be captured, and the true eager model that its engine is compared with."""

    name: str
    """Short name for reports: the folder's name, or the factory as it was given."""
    config: PreTrainedConfig | None = None
    model_class: type[nn.Module] | None = None
    """Class of the model, where it is known before the model is built."""
    folder: Path | None = None
    """Where its files are."""
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
    text_form: TextForm = PLAIN
    """What prompts are made before they are tokenized."""
    pads: Side | None = None
    """Where prompts are padded; None: as the tokenizer's files say."""
    longest_text: int | None = None
    """Tokens at which a text is cut, where that is fewer than the model takes."""
    task: str = ""
    """What its engines are called in turn for; empty: each call stands by itself."""

    buffers: Mapping[str, Tensor] = MappingProxyType({})
    """Buffers that hold the state of the module, with their initial values."""
    start: Mapping[str, Tensor] = MappingProxyType({})
    """Inputs that hold the state of the module, with what the first call is fed."""
    takes_file: bool = True
    """Whether a user's file of tensors may give its inputs."""

    @property
    def left_out(self) -> Mapping[str, str]:
        """What the model returns by default and an engine does not, with the option for it."""
        return {}

    def parts(self) -> Mapping[str, "Source"]:
        """The parts of the model that are engines of their own, by the folders of their bundles."""
        return {}

    def take_class(self, model_class: type[Any]) -> None:  # noqa: B027 - mostly it is what it is
        """Load the model as another class, before anything was loaded, where that can be chosen."""

    def without_state(self) -> "Source":
        """The module as it was given, whose state is not an input."""
        return self

    def state_inputs(self) -> Iterable[InputSpec]:
        """Those of `inputs` that hold the state of the module."""
        return ()

    def as_called(self) -> "Source":
        """The model, whose inputs are those of the call of its class, where that is known."""
        return self

    def inputs(self) -> tuple[InputSpec, ...]:
        """The inputs: of the example, or of the config and the arguments of `forward`.

        Raises:
            UsageError: one cannot be derived.
        """
        example = self.example()
        if example:
            recorded, alone = bool(self.recorded), self.is_one_image
            specs = from_example(example, self.config, of_pipeline=recorded, no_batch=alone)
            return self.require(specs)
        if self.config is None:
            raise UsageError(
                f"{self.name} comes without example inputs",
                hint="Give some: example=... in Python, (module, example) from a factory, or"
                " --inputs FILE.safetensors.",
            )
        return from_facts(self.facts(self.config))

    @property
    def is_one_image(self) -> bool:
        """Whether an engine of its class takes one image, without a batch."""
        return getattr(self.model_class, "__name__", "") in ONE_BY_ONE

    def facts(self, config: PreTrainedConfig) -> ModelFacts:
        """What tells its inputs."""
        arguments = self.forward_arguments
        main = getattr(self.model_class, "main_input_name", ())
        names = (main,) if isinstance(main, str) else tuple(main)
        return ModelFacts(
            config,
            arguments,
            self.name,
            self.required_arguments,
            tuple(name for name in names if name in arguments),
            documented(self.model_class),
            self.tokenized,
            {} if self.call is None else self.call.fixed,
        )

    def require(self, specs: tuple[InputSpec, ...]) -> tuple[InputSpec, ...]:
        """Return `specs` when they cover what `forward` must be given.

        Raises:
            UsageError: an argument without default has no input.
        """
        names = {spec.name for spec in specs}
        missing = [name for name in self.required_arguments if name not in names]
        if missing:
            raise UsageError(
                f"the input {missing[0]!r} of {self.name} cannot be derived",
                hint="Give it with the others: --inputs FILE.safetensors.",
            )
        return specs

    def check_arguments(self, names: Iterable[str], origin: str) -> None:
        """Raise UsageError if an input is not an argument of `forward`."""
        unknown = sorted(set(names) - set(self.forward_arguments))
        if unknown:
            raise UsageError(
                f"{origin}: {self.name} takes no input {unknown[0]!r}",
                hint=f"It takes {', '.join(self.forward_arguments)}."
                if self.forward_arguments
                else "Its forward must name its arguments, not take *args or **kwargs.",
            )

    def of_part(
        self, options: Sequence[DynamicOption], specs: Sequence[InputSpec]
    ) -> Sequence[DynamicOption]:
        """The options that are for the inputs of this part of a model, which has these inputs."""
        return options

    def encode(
        self, prompts: Sequence[str], specs: Sequence[InputSpec]
    ) -> dict[str, Tensor] | None:
        """The inputs for prompts: token ids, mask and types, [prompts, tokens] each, cut at the
        longest sequence allowed; None where another part reads them.

        Raises:
            UsageError: the model has no tokenizer.json or takes no token ids.
            SourceError: tokenizer.json is damaged.
        """
        return self._tokenized(prompts, specs, self.padding_side)

    def _tokenized(
        self, prompts: Sequence[str], specs: Sequence[InputSpec], side: Side
    ) -> dict[str, Tensor]:
        file = next((file for file in self.tokenizer_files if file.name == TOKENIZER_FILE), None)
        ids = next((spec for spec in specs if spec.kind == "token_ids"), None)
        if file is None or ids is None:
            lack = TOKENIZER_FILE if file is None else "input of token ids"
            raise UsageError(
                f"--prompts does not fit {self.name}: it has no {lack}",
                hint="Give the inputs as tensors: --inputs FILE.safetensors.",
            )
        sequence = ids.dims[-1]
        try:
            tokenizer = open_tokenizer(file, sequence.maximum, form=self.text_form)
        except BundleError as error:
            raise SourceError(error.message) from error
        encodings = tokenize(tokenizer, self.text_form, prompts)
        least, step = sequence.minimum, sequence.step
        arrays = pad(encodings, ids.padding or 0, least=least, step=step, side=side)
        return {
            spec.name: torch.from_numpy(arrays[spec.kind]).to(spec.dtype)
            for spec in specs
            if spec.kind in arrays
        }

    @property
    def padding_side(self) -> Side:
        """Where its tokenizer pads; on the right where its files do not say.

        Raises:
            SourceError: one of them cannot be read.
        """
        return self.pads or padding_side(*self._of_tokenizer()) or "right"

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

        The config's keys are in order, so that their order in the model's own file does not count.
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

    @property
    def stored(self) -> Stored:
        """What its files hold, where some of it is quantized; else nothing of it."""
        return Stored({})

    def scales(self) -> Scales:
        """The scales of weights that its files hold in float8_e4m3fn, by the names in `weights`:
        fp32, [] or [N, 1].
        """
        return {}

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
