"""Names for what a model returns: fields of ModelOutput, dict and dataclass; numbers in tuples."""

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from enginecast.errors import CaptureError


@dataclass(frozen=True)
class OutputSpec:
    """One output: name, dtype, and each dimension as a number, a symbol's name or an expression."""

    name: str
    dtype: torch.dtype
    dims: tuple[int | str, ...]


def named_tensors(value: Any) -> dict[str, Tensor]:
    """Flatten what a model returned to tensors by name, in order; None is left out.

    A field keeps its name, an item of a tuple is `output_0`, or `hidden_states.0` inside a field.

    Raises:
        CaptureError: something that is neither a tensor nor a container of tensors, or no tensor.
    """
    found = dict(_walk(value, ()))
    if not found:
        raise CaptureError("the model returns no tensor")
    return found


def name_outputs(module: nn.Module, arguments: Sequence[str]) -> None:
    """Make `module.forward` take `arguments` by keyword and return tensors by name, in place.

    Wrapping the module instead would put a prefix before every module path in the program.
    """
    forward: Callable[..., Any] = module.forward

    def named_forward(**inputs: Tensor) -> dict[str, Tensor]:
        return named_tensors(forward(**inputs))

    named_forward.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in arguments]
    )
    module.forward = named_forward


def _walk(value: Any, path: tuple[str, ...]) -> Iterator[tuple[str, Tensor]]:
    if value is None:
        return
    if isinstance(value, Tensor):
        yield ".".join(path) or "output_0", value
        return
    for key, item in _items(value, path):
        name = key if path or not key.isdigit() else f"output_{key}"
        yield from _walk(item, (*path, name))


def _items(value: Any, path: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):  # ModelOutput too
        return ((str(key), item) for key, item in value.items())
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
        return ((name, getattr(value, name)) for name in names)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return zip(value._fields, value, strict=True)
    if isinstance(value, (tuple, list)):
        return ((str(index), item) for index, item in enumerate(value))
    raise CaptureError(
        f"the model returns a {type(value).__name__} as {'.'.join(path) or 'its output'}, "
        "expected tensors in tuples, dicts or dataclasses",
        hint="Switch caches off (config.use_cache = False), or wrap the model so that it returns "
        "tensors alone.",
    )
