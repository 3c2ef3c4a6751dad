"""Numbers that a model keeps in zero-dimensional tensors, computed from sizes.

Audio codecs keep the stride of a convolution in a buffer, and compute from it and from the length
of a signal how much padding is needed.  Read while tracing, such a tensor is a number that torch
knows nothing of, and every size behind it as well.  Here these tensors are followed beside the
trace, as whole numbers and as quotients of them, so that reading one gives the expression in sizes
that it is.

What PyTorch rounds must not be taken for exact: a quotient is followed only as far as its fp32
value leads to the same whole number in all sizes that are traced.
"""

import math
import operator
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import SymInt, Tensor, nn
from torch.overrides import TorchFunctionMode

from enginecast.capture.python.recompile import forward_within
from enginecast.capture.python.tensor_facts import TensorFacts

EXACT = 2**24
"""Whole numbers up to this are exact in fp32."""
ROUNDING = 2.0**-24
"""Relative error of one operation in fp32."""
WHOLE = (torch.int64, torch.int32)


@dataclass(frozen=True)
class _Number:
    """over / under, which a tensor of `dtype` holds."""

    over: Any
    """A whole number: int or SymInt; of a truth value a bool or SymBool."""
    dtype: torch.dtype
    under: int = 1
    error: float = 0.0
    """Largest error of what the tensor holds in fp32, where its value may be a fraction."""

    @property
    def is_whole(self) -> bool:
        return self.dtype in WHOLE


def numbers_of(module: nn.Module) -> dict[str, int]:
    """The buffers of `module`, which has weights, that hold one whole number without dimensions."""
    return {
        name: int(buffer)
        for name, buffer in module.named_buffers(remove_duplicate=False)
        if buffer.dtype in WHOLE and not buffer.dim()
    }


@contextmanager
def following_numbers(module: nn.Module, known: Mapping[str, int]) -> Iterator[None]:
    """Let `module.forward` read numbers that follow from sizes and from `known` as expressions.

    Args:
        module: what is traced.
        known: values of its buffers, by name.
    """

    def following() -> _Following:
        buffers = module.named_buffers(remove_duplicate=False)
        return _Following([(buffer, known[name]) for name, buffer in buffers if name in known])

    with forward_within(module, following):
        yield


class _Following(TorchFunctionMode):
    def __init__(self, held: list[tuple[Tensor, int]]) -> None:
        super().__init__()
        self._numbers = TensorFacts[_Number]()
        for tensor, value in held:
            self._note(tensor, _Number(value, tensor.dtype))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        number = self._of(args[0]) if name in READERS else None
        if number is not None and (number.is_whole or number.dtype == torch.bool):
            if name == "item":
                return number.over
            if name == "__bool__":
                return bool(number.over)
            if isinstance(number.over, int):  # Python itself takes none that is symbolic
                return number.over
        if name in ("pad", "__getitem__") and len(args) > 1:
            args = (args[0], self._read_all(args[1]), *args[2:])
        result = func(*args, **kwargs)
        if isinstance(result, Tensor) and not result.dim():
            found: _Number | None = None
            if name in CASTS and (given := self._of(args[0])) is not None:
                is_exact = result.dtype in WHOLE and (given.under == 1 or given.is_whole)
                found = _Number(given.over, result.dtype) if is_exact else given
                found = found if found.dtype == result.dtype else None
            elif name in RULES and not kwargs:
                parts = [self._of(arg) for arg in args]
                found = None if None in parts else RULES[name](*parts)
                found = None if found is None else _rounded(found, result.dtype)
            self._note(result, found)
        return result

    def _note(self, tensor: Tensor, number: _Number | None) -> None:
        if number is not None:
            self._numbers.note(tensor, number)

    def _of(self, value: Any) -> _Number | None:
        """What is known of an argument."""
        if isinstance(value, int | SymInt) and not isinstance(value, bool):
            return _Number(value, torch.int64)
        if not isinstance(value, Tensor) or value.dim():
            return None
        is_constant = type(value) in (Tensor, nn.Buffer)  # of the model, and not fake
        if value not in self._numbers and is_constant and value.dtype in WHOLE:
            self._note(value, _Number(int(value), value.dtype))
        return self._numbers.of(value)

    def _read_all(self, tree: Any) -> Any:
        """An index or sizes with numbers in place of tensors that are known."""
        if isinstance(tree, tuple | list):
            return type(tree)(map(self._read_all, tree))
        if isinstance(tree, slice):
            return slice(*map(self._read_all, (tree.start, tree.stop, tree.step)))
        number = self._of(tree) if isinstance(tree, Tensor) else None
        return tree if number is None or not number.is_whole else number.over


READERS = ("item", "__bool__", "__int__", "__index__")
CASTS = ("to", "long", "int", "clone", "detach")
Rule = Callable[..., _Number | None]


def _added(one: _Number, other: _Number) -> _Number | None:
    if one.under != 1 and other.under != 1:
        return None
    if one.under == 1 and other.under != 1:
        one, other = other, one
    over = one.over + other.over * one.under
    return _Number(over, one.dtype, one.under, one.error + other.error)


def _negated(one: _Number) -> _Number:
    return _Number(-one.over, one.dtype, one.under, one.error)


def _divided(one: _Number, other: _Number) -> _Number | None:
    exact = one.is_whole and _largest(one.over) < EXACT
    return _Number(one.over, torch.float32, other.over) if exact and _divides(other) else None


def _divides(number: _Number) -> bool:
    return number.is_whole and isinstance(number.over, int) and number.over > 0


def _of_whole(compute: Callable[[Any, Any], Any], dtype: torch.dtype | None = None) -> Rule:
    """A rule for two whole numbers."""

    def rule(one: _Number, other: _Number) -> _Number | None:
        are_whole = one.is_whole and other.is_whole
        return _Number(compute(one.over, other.over), dtype or one.dtype) if are_whole else None

    return rule


def _to_whole(compute: Callable[[Any, int], Any]) -> Rule:
    """A rule that rounds, where what fp32 holds lies between the same whole numbers, or is one."""

    def rule(one: _Number) -> _Number | None:
        is_near = one.error * one.under < 0.5
        return _Number(compute(one.over, one.under), one.dtype) if is_near else None

    return rule


def _turned(rule: Rule) -> Rule:
    return lambda one, other: rule(other, one)


def _subtracted(one: _Number, other: _Number) -> _Number | None:
    return _added(one, _negated(other))


def _floor_divided(one: _Number, other: _Number) -> _Number | None:
    return _of_whole(operator.floordiv)(one, other) if _divides(other) else None


RULES: dict[str, Rule] = {
    "neg": _negated,
    "ceil": _to_whole(lambda over, under: -(-over // under)),
    "floor": _to_whole(operator.floordiv),
    "maximum": _of_whole(torch.sym_max),
    "minimum": _of_whole(torch.sym_min),
    "rsub": _turned(_subtracted),
    "true_divide": _divided,
    "__truediv__": _divided,
    "floor_divide": _floor_divided,
}
for _name, _rule in {
    "add": _added,
    "sub": _subtracted,
    "mul": _of_whole(operator.mul),
    "div": _divided,
    "floordiv": _floor_divided,
}.items():
    RULES |= {_name: _rule, f"__{_name}__": _rule, f"__r{_name}__": _turned(_rule)}
for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    RULES[_name] = RULES[f"__{_name}__"] = _of_whole(getattr(operator, _name), torch.bool)


def _rounded(number: _Number, dtype: torch.dtype) -> _Number | None:
    """The number as a result of this dtype; None where it may be rounded to another one."""
    if dtype == torch.bool:
        return number
    if dtype in WHOLE:
        return _Number(number.over, dtype) if number.under == 1 else None
    if dtype != torch.float32:
        return None
    largest = _largest(number.over)
    if largest >= EXACT * number.under:
        return None
    error = number.error + largest / number.under * ROUNDING if number.under > 1 else 0.0
    return _Number(number.over, dtype, number.under, error)


def _largest(value: Any) -> float:
    """The largest magnitude of a whole number in the sizes that are traced."""
    if not isinstance(value, SymInt):
        return float(abs(value))
    bounds = value.node.shape_env.bound_sympy(value.node.expr)
    if not (bounds.lower.is_finite and bounds.upper.is_finite):
        return math.inf
    return max(abs(int(bounds.lower)), abs(int(bounds.upper)))
