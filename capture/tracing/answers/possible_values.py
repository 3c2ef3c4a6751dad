"""Tests that have the same result for all values that an input may have.

A mask holds zeros and ones, and code that knows of more, such as a two that marks a token which all
others attend to, asks whether there is one.  Here all values that an element may have are followed
through what is computed element by element.  Where a test of them has one answer for every input,
that is what the trace reads.
"""

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from enginecast.capture.inputs.specs import InputSpec
from enginecast.capture.python.recompile import replaced
from enginecast.capture.python.tensor_facts import ELEMENTWISE, MOVES, REDUCES, TensorFacts
from enginecast.library_names import private

MOST_VALUES = 64
"""Of an element."""
NUMBERS = (bool, int, float)


@dataclass(frozen=True)
class _Possible:
    """What an element may hold: one of `values`.

    Two tensors with one `layout` hold the values of one index at each place.
    """

    values: Tensor
    layout: object


def values_of(specs: Sequence[InputSpec]) -> dict[str, range]:
    """The values of inputs that may have few, which an engine checks; by name."""
    return {
        spec.name: range(spec.low, spec.high + 1)
        for spec in specs
        if spec.kind == "attention_mask" and spec.low is not None and spec.high is not None
    }


@contextmanager
def answering_certain(module: nn.Module, known: Mapping[str, range]) -> Iterator[None]:
    """Let `module.forward` read tests that come out the same for all inputs.

    Args:
        module: what is traced.
        known: the values that inputs may have, by name.
    """
    forward = module.forward

    @functools.wraps(forward)  # torch.export asks for its signature
    def answered(*args: Any, **kwargs: Any) -> Any:
        given = [(kwargs[name], values) for name, values in known.items() if name in kwargs]
        with _Values(given):
            return forward(*args, **kwargs)

    with replaced(module, "forward", answered):
        yield


class _Values(TorchFunctionMode):
    def __init__(self, given: Sequence[tuple[Tensor, range]]) -> None:
        super().__init__()
        self._known = TensorFacts[_Possible]()
        for tensor, values in given:
            with _real():
                possible = torch.tensor(list(values), dtype=tensor.dtype)
            self._note(tensor, _Possible(possible, object()))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        first = self._of(args[0]) if args else None
        if name in ("item", "__bool__") and first is not None:
            answers = _listed(first.values)
            if len(set(answers)) == 1:
                return answers[0] if name == "item" else bool(answers[0])
        result = func(*args, **kwargs)
        if name == "__setitem__" and first is not None and self._is_never(args[1]):
            self._note(args[0], first)  # nothing was written
        if isinstance(result, Tensor):
            with _real():
                found = self._result(func, name, first, args, kwargs, result.dtype)
            if found is not None and found.values.dtype == result.dtype:
                self._note(result, found)
        return result

    def _is_never(self, mask: Any) -> bool:
        """Whether a mask is false everywhere, so that nothing is written where it is true."""
        found = self._of(mask)
        return (
            found is not None
            and found.values.dtype == torch.bool
            and not any(_listed(found.values))
        )

    def _of(self, value: Any) -> _Possible | None:
        return self._known.of(value)

    def _note(self, tensor: Tensor, found: _Possible) -> None:
        if len(found.values) <= MOST_VALUES:
            self._known.note(tensor, found)

    def _result(
        self,
        func: Callable[..., Any],
        name: str,
        first: _Possible | None,
        args: Any,
        kwargs: Any,
        dtype: torch.dtype,
    ) -> _Possible | None:
        if name in ELEMENTWISE:
            # What a function gives element by element, computed for each value of its arguments,
            # and for each pair where these are of other places.
            leaves, spec = pytree.tree_flatten((args, kwargs))
            if not any(self._of(leaf) is not None for leaf in leaves):
                return None
            parts = [self._part(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            if None in [part for leaf, part in zip(leaves, parts, strict=True) if leaf is not None]:
                return None
            sizes = {part.layout: len(part.values) for part in parts if isinstance(part, _Possible)}
            count = math.prod(sizes.values())
            if count > MOST_VALUES:
                return None
            grid = torch.arange(count).reshape(tuple(sizes.values()))
            places = dict(zip(sizes, torch.unravel_index(grid.flatten(), grid.shape), strict=True))
            given = [
                part.values[places[part.layout]] if isinstance(part, _Possible) else part
                for part in parts
            ]
            arguments, named = pytree.tree_unflatten(given, spec)
            [layout] = sizes if len(sizes) == 1 else [object()]
            return _Possible(func(*arguments, **named), layout)
        filling = _filling(name, args, kwargs)
        if filling is not None:
            return _Possible(torch.tensor([filling]).to(dtype), object())
        if first is None:
            return None
        if name in MOVES:
            return _Possible(first.values, object())
        if name == "pad" and func is functional.pad and _is_filled(args, kwargs):
            filling = kwargs.get("value", args[3] if len(args) > 3 else None) or 0
            added = torch.tensor([filling], dtype=first.values.dtype)
            return _Possible(torch.cat([first.values, added]), object())
        if name in REDUCES and len(args) == 1 and not kwargs:
            value = REDUCES[name]
            are_all = bool(((first.values != 0) == value).all())
            return _Possible(torch.tensor([value]), object()) if are_all else None
        return None

    def _part(self, tensor: Tensor) -> "_Possible | Tensor | None":
        """What an argument may hold: any truth value, where nothing is known of it."""
        found = self._of(tensor)
        if found is not None:
            return found
        constant = getattr(tensor, "constant", None)
        if isinstance(constant, Tensor) and not constant.dim():
            return constant
        if tensor.dtype == torch.bool:
            return _Possible(torch.tensor([False, True]), object())
        return None


@contextmanager
def _real() -> Iterator[None]:
    """Compute within the block, and trace nothing."""
    no_modes = private("torch.utils._python_dispatch._disable_current_modes", "tracing")
    with torch._C.DisableTorchFunction(), no_modes():
        yield


def _listed(values: Tensor) -> list[Any]:
    with _real():
        listed: list[Any] = values.tolist()
    return listed


def _filling(name: str, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """The number that a function fills a new tensor with; None where it is none."""
    kind = name.removeprefix("new_").removesuffix("_like")
    if kind == "full":
        value = kwargs.get("fill_value", args[-1] if len(args) > 1 else None)
        return value if type(value) in NUMBERS else None
    return {"zeros": 0, "ones": 1}.get(kind)


def _is_filled(args: Any, kwargs: Mapping[str, Any]) -> bool:
    """Whether a pad adds elements of one number."""
    mode = kwargs.get("mode", args[2] if len(args) > 2 else "constant")
    value = kwargs.get("value", args[3] if len(args) > 3 else None)
    return mode == "constant" and (value is None or isinstance(value, NUMBERS))
