"""`.pt2` files: torch.export programs.  AOTInductor packages look alike and are refused."""

import inspect
import zipfile
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind
from torch.utils import _pytree as pytree

from enginecast.capture.sources.base.source import Source
from enginecast.capture.sources.weights.checkpoint import sha256_of
from enginecast.capture.sources.weights.finite import lost_of, require_finite
from enginecast.errors import SourceError, UsageError


class ByName(nn.Module):
    """A program as a module that takes its inputs by name, however they were given to torch.export.

    `program.module()` wants those that were positional by position, and containers as they were.
    """

    def __init__(self, program: ExportedProgram) -> None:
        super().__init__()
        module = program.module()
        assert isinstance(module, nn.Module)
        self.module = module
        specs = program.graph_signature.input_specs
        given = [spec.arg for spec in specs if spec.kind == InputKind.USER_INPUT]
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        names = [arg.name for arg in given if not isinstance(arg, ConstantArgument)]
        signature = inspect.Signature([inspect.Parameter(name, kind) for name in names])

        def forward(*args: Tensor, **kwargs: Tensor) -> object:
            inputs = signature.bind(*args, **kwargs).arguments
            leaves = [
                arg.value if isinstance(arg, ConstantArgument) else inputs[arg.name]
                for arg in given
            ]
            spec = program.call_spec.in_spec
            positional, by_keyword = pytree.tree_unflatten(leaves, spec)
            return module(*positional, **by_keyword)

        forward.__signature__ = signature  # type: ignore[attr-defined]
        self.forward = forward


class ProgramSource(Source):
    """A program that was captured before; there is no module behind it."""

    def __init__(self, path: Path, program: ExportedProgram) -> None:
        self.name = path.stem
        self._path = path
        self._program = program

    @cached_property
    def _fingerprint(self) -> Mapping[str, str]:
        buffers = set(self._program.graph_signature.buffers)
        for name, tensor in self._program.state_dict.items():
            require_finite(lost_of(tensor), f"{self._path}: {name}", is_buffer=name in buffers)
        return {"program": sha256_of([self._path])}

    def eager(self, dtype: torch.dtype = torch.float32) -> nn.Module:
        if dtype != torch.float32:
            raise SourceError(
                f"{self._path} is a program: it has no eager model in {dtype}",
                hint="Give the model that the program was captured from.",
            )
        return ByName(self._program).requires_grad_(False)

    def empty(self) -> nn.Module:
        raise SourceError(f"{self._path} is a program: it needs no capture")

    def weights(self) -> dict[str, Tensor]:
        return dict(self._program.state_dict)

    @property
    def forward_signature(self) -> inspect.Signature:
        return inspect.signature(self._program.module().forward)

    def given_program(self) -> ExportedProgram:
        return self._program


def open_program_file(path: Path, *, allow_code: bool) -> ProgramSource:
    """Load a `.pt2` program.

    Raises:
        SourceError: no such file, no `.pt2`, a package of AOTInductor, or one torch cannot read.
        UsageError: `allow_code` is not given: loading a `.pt2` unpickles, which can run code.
    """
    kind = sniff(path)
    if not allow_code:
        raise UsageError(
            f"{path} is {kind}: loading it can run code",
            hint="Give --allow-code if you trust the source of the file.",
        )
    if kind != "an exported program":
        raise SourceError(
            f"{path} is {kind}: machine code, which no pass can rewrite",
            hint="Give the model or the exported program it was compiled from.",
        )
    try:
        program = torch.export.load(path)
    except Exception as error:  # unpickling foreign data raises any kind
        raise SourceError(f"{path} cannot be loaded: {type(error).__name__}: {error}") from error
    return ProgramSource(path, program)


def sniff(path: Path) -> str:
    """What a `.pt2` file contains, from the names in its zip directory, without loading any of it.

    Raises:
        SourceError: the file is missing, no zip, or neither of the two kinds.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            names = ["/" + name for name in archive.namelist()]
    except FileNotFoundError as error:
        raise SourceError(f"{path} does not exist") from error
    except (zipfile.BadZipFile, OSError) as error:
        raise SourceError(f"{path} is not a .pt2 file: {error}") from error
    if any("/aotinductor/" in name for name in names):
        return "an AOTInductor package"
    if any("/models/" in name or "serialized_exported_program" in name for name in names):
        return "an exported program"
    raise SourceError(f"{path} is a zip file without a program of torch.export")
