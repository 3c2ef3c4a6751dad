"""The examples of torch.export's own database, as modules that take tensors by name.

`torch/_export/db/examples` of the installed torch lists what torch.export supports and what it does
not.  Each example is taken with its own inputs.  Where those are nested or hold Python values, a
wrapper binds the values and takes the tensors alone, since an engine's inputs are tensors.

The files are copied out of torch before they are imported: messages name the lines of a user's
code and skip those of torch itself.
"""

import importlib.util
import inspect
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch._export.db.examples as installed
from torch import Tensor, nn
from torch.utils import _pytree as pytree

MOST = 64
"""Largest size of a dimension that an example lets grow without a bound."""
UNBOUNDED = 2**31


@dataclass(frozen=True)
class DbExample:
    """One example: a module, the tensors that it is called with, and the dimensions that vary."""

    name: str
    module: nn.Module
    inputs: Mapping[str, Tensor]
    dynamic: tuple[str, ...]
    """Options of --dynamic, for the dimensions that the example declares dynamic."""


class Bound(nn.Module):
    """A module with its containers and Python values bound: it takes the tensors by name."""

    def __init__(self, module: nn.Module, call: Any, names: Sequence[str]) -> None:
        super().__init__()
        self.module = module
        leaves, self._structure = pytree.tree_flatten(call)
        self._leaves = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        tensors = [index for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        self._places = dict(zip(names, tensors, strict=True))

    def forward(self, **tensors: Tensor) -> Any:
        leaves: list[Any] = list(self._leaves)
        for name, tensor in tensors.items():
            leaves[self._places[name]] = tensor
        args, kwargs = pytree.tree_unflatten(leaves, self._structure)
        return self.module(*args, **kwargs)


def db_names() -> tuple[str, ...]:
    """The names of all examples of the installed torch."""
    return tuple(path.stem for path in _files())


def db_example(name: str, folder: Path) -> DbExample:
    """One example, imported from a copy of its file in `folder`; its inputs are seeded."""
    source = next(path for path in _files() if path.stem == name)
    copy = folder / source.name
    if not copy.exists():
        shutil.copyfile(source, copy)
    torch.manual_seed(0)
    return _adapted(name, _imported(f"db_example_{name}", copy))


def _files() -> list[Path]:
    assert installed.__file__ is not None
    folder = Path(installed.__file__).parent
    return sorted(path for path in folder.glob("*.py") if path.stem != "__init__")


def _imported(name: str, file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # inspect finds the source of a class through it
    spec.loader.exec_module(module)
    return module


def _adapted(name: str, file: ModuleType) -> DbExample:
    module: nn.Module = file.model.eval()
    args: tuple[Any, ...] = file.example_args
    kwargs: dict[str, Any] = getattr(file, "example_kwargs", {})
    arguments = inspect.signature(module.forward).bind(*args, **kwargs).arguments
    inputs = dict(_named(arguments))
    if inputs.keys() != arguments.keys():
        # Paths of the arguments and leaves of the call come in the same order.
        module = Bound(module, (args, kwargs), list(inputs)).eval()
    dynamic = tuple(_options(getattr(file, "dynamic_shapes", None) or {}))
    return DbExample(name, module, inputs, dynamic)


def _named(arguments: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Each tensor with a name made of the way to it: tuple0_1 is item 1 of tuple0."""
    for path, leaf in pytree.tree_flatten_with_path(dict(arguments))[0]:
        if isinstance(leaf, Tensor):
            yield "_".join(str(getattr(key, "key", getattr(key, "idx", key))) for key in path), leaf


def _options(shapes: Mapping[str, Any]) -> Iterator[str]:
    for name, dims in shapes.items():
        for index, dim in (dims or {}).items():
            most = dim.max if dim.max < UNBOUNDED else MOST
            yield f"{name}:{index}={max(dim.min, 1)}..{most}"
