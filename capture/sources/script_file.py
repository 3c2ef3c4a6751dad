"""TorchScript files: modules that torch.jit.save wrote, scripted or traced.

The names in the zip directory of a file and in its pickle say what it holds.  The pickle is never
run, so a checkpoint or a pickled module is refused by name before anything of it is loaded.
"""

import copy
import inspect
import pickletools
import warnings
import zipfile
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from enginecast.capture.inputs.calls import call_of
from enginecast.capture.sources.base.source import Source
from enginecast.capture.sources.calls.recording import Recorded
from enginecast.capture.sources.factory import arguments_of
from enginecast.capture.sources.weights.checkpoint import sha256_of
from enginecast.capture.sources.weights.copies import cast_module
from enginecast.capture.sources.weights.finite import lost_of, require_finite
from enginecast.errors import SourceError, UsageError

_LONGEST_PICKLE = 64 << 20
_OF_TENSORS = ("torch", "collections", "numpy", "_codecs", "builtins", "__builtin__")
"""Packages whose names stand in the pickle of a checkpoint that holds tensors and numbers alone."""
_SCRIPT = "a TorchScript module"
_AS_FACTORY = "Give a function that builds the model and loads this file, as package.module:factory"


class Scripted(nn.Module):
    """A scripted or traced module that takes its inputs by name."""

    def __init__(self, script: torch.jit.ScriptModule) -> None:
        super().__init__()
        self.script = script
        signature = signature_of(self.script)

        def forward(*args: Tensor, **kwargs: Tensor) -> object:
            return self.script(*args, **kwargs)

        forward.__signature__ = signature  # type: ignore[attr-defined]
        self.forward = forward

    def __deepcopy__(self, memo: dict[int, Any]) -> "Scripted":
        return Scripted(copy.deepcopy(self.script, memo))


def signature_of(script: torch.jit.ScriptModule) -> inspect.Signature:
    """The arguments of a script's `forward`, without self."""
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    plain: Any = script.forward
    _, *arguments = plain.schema.arguments
    return inspect.Signature(
        [
            inspect.Parameter(
                argument.name,
                kind,
                default=argument.default_value
                if argument.has_default_value()
                else inspect.Parameter.empty,
            )
            for argument in arguments
        ]
    )


class ScriptSource(Source):
    """A module of TorchScript; there is no Python code behind it."""

    def __init__(self, path: Path, script: torch.jit.ScriptModule, example: Any = None) -> None:
        self.name = path.stem
        self._path = path
        self._script = script.eval()
        for parameter in script.parameters():
            parameter.requires_grad_(False)
        self.trained = frozenset()
        if isinstance(example, Recorded):
            call, self._example = example.call, example.example
            self.recorded, self.notes = example.by_name, example.notes
        else:
            given = arguments_of(example, self.name, Scripted(script).forward)
            call, self._example = call_of(given, self.name)
        if not call.is_plain:
            raise SourceError(
                f"{path} is {_SCRIPT}: expected an example of one tensor for each argument",
                hint="Script a module around it that takes tensors alone.",
            )

    @cached_property
    def _fingerprint(self) -> Mapping[str, str]:
        buffers = {name for name, _ in self._script.named_buffers()}
        for name, tensor in self.weights().items():
            require_finite(lost_of(tensor), f"{self._path}: {name}", is_buffer=name in buffers)
        return {"script": sha256_of([self._path])}

    def eager(self, dtype: torch.dtype = torch.float32) -> nn.Module:
        """A copy of the script with floats in `dtype`; constants in its code keep theirs."""
        return cast_module(Scripted(copy.deepcopy(self._script)), dtype)

    def empty(self) -> nn.Module:
        raise SourceError(
            f"{self._path} is {_SCRIPT}: torch.export does not capture it",
            hint="Export it with --target torchscript, or --target onnxruntime in fp32.",
        )

    def weights(self) -> dict[str, Tensor]:
        return dict(self._script.state_dict())

    @property
    def forward_signature(self) -> inspect.Signature:
        return signature_of(self._script)

    def example(self) -> dict[str, Tensor]:
        return dict(self._example)

    def given_script(self) -> torch.jit.ScriptModule:
        return self._script


def open_script_file(path: Path, *, allow_code: bool, example: Any = None) -> ScriptSource:
    """Load a file of TorchScript.

    Args:
        path: of the file.
        allow_code: whether it may be loaded.
        example: recorded calls, or what `arguments_of` takes; one tensor for each argument.

    Raises:
        SourceError: it holds something else, as a checkpoint or a pickled module, or is damaged; or
            the example does not fit.
        UsageError: `allow_code` is not given: TorchScript is code.
    """
    kind = sniff(path)
    if kind != _SCRIPT:
        raise SourceError(f"{path} is {kind}: not a model that can run", hint=f"{_AS_FACTORY}.")
    if not allow_code:
        raise UsageError(
            f"{path} is {kind}: loading it can run code",
            hint="Give --allow-code if you trust the source of the file.",
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # torch 2.14: load is deprecated
            script = torch.jit.load(path, map_location="cpu")
    except Exception as error:  # reading foreign data raises any kind
        raise SourceError(f"{path} cannot be loaded: {type(error).__name__}: {error}") from error
    if not hasattr(script, "forward"):
        raise SourceError(f"{path}: the TorchScript module has no forward method")
    if not hasattr(script, "training"):
        raise SourceError(
            f"{path} is frozen: its weights are constants of its code, so that it does not run in"
            " fp64, which engines are compared with",
            hint="Save the module before torch.jit.freeze or torch.jit.optimize_for_inference.",
        )
    return ScriptSource(path, script, example)


def sniff(path: Path) -> str:
    """A description of what a torch file contains, without loading any of it.

    Raises:
        SourceError: the file is missing, too large a pickle, or damaged.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            return _of_zip(path, archive)
    except FileNotFoundError as error:
        raise SourceError(f"{path} does not exist") from error
    except zipfile.BadZipFile as error:
        raise SourceError(
            f"{path} is not a zip file that torch wrote: damaged, or written before torch 1.6",
            hint=f"Save it again with a newer torch. {_AS_FACTORY}.",
        ) from error
    except OSError as error:
        raise SourceError(f"{path} cannot be read: {error.strerror or error}") from error


def _of_zip(path: Path, archive: zipfile.ZipFile) -> str:
    names = archive.namelist()
    parts = {name.partition("/")[2] for name in names}
    if "constants.pkl" in parts and any(part.startswith("code/") for part in parts):
        return _SCRIPT
    pickles = [name for name in names if name.partition("/")[2] == "data.pkl"]
    if len(pickles) != 1:
        raise SourceError(f"{path} is a zip file that torch.save and torch.jit.save do not write")
    entry = archive.getinfo(pickles[0])
    if entry.file_size > _LONGEST_PICKLE:
        raise SourceError(f"{path}: its pickle has {entry.file_size} bytes, too many to look at")
    try:
        # The names of classes and functions in a pickle, read without running it.
        pickled = archive.read(entry)
        classes: list[str] = []
        texts: list[str] = []
        for opcode, argument, _ in pickletools.genops(pickled):
            if opcode.name in ("GLOBAL", "INST"):
                classes.append(str(argument).replace(" ", "."))
            elif opcode.name == "STACK_GLOBAL" and len(texts) > 1:
                classes.append(f"{texts[-2]}.{texts[-1]}")
            elif isinstance(argument, str):
                texts.append(argument)
    except (ValueError, IndexError, zipfile.BadZipFile, NotImplementedError, RuntimeError) as error:
        raise SourceError(f"{path}: its pickle is damaged: {error}") from error
    others = [name for name in classes if name.split(".")[0] not in _OF_TENSORS]
    modules = [name for name in classes if name.startswith("torch.nn.modules.")]
    if others or modules:
        return f"a pickled object of Python code ({(others or modules)[0]})"
    return "a checkpoint: weights by name (a state_dict), without the code of a model"
