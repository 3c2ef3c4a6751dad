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
        number = self._of(args[0]) if name in _READERS else None
        value = None if number is None else _READERS[name](number)
        if value is not None:
            return value
        if name in ("pad", "__getitem__") and len(args) > 1:
            args = (args[0], self._read_all(args[1]), *args[2:])
        result = func(*args, **kwargs)
        if isinstance(result, Tensor) and not result.dim():
            self._note(result, self._computed(name, args, kwargs, result.dtype))
        return result

    def _computed(self, name: str, args: Any, kwargs: Any, dtype: torch.dtype) -> _Number | None:
        """What a function gives without dimensions."""
        if name in _CASTS:
            found = self._of(args[0])
            return None if found is None else _cast(found, dtype)
        rule = _RULES.get(name)
        parts = [self._of(arg) for arg in args]
        if rule is None or kwargs or None in parts:
            return None
        found = rule(*parts)
        return None if found is None else _checked(found, dtype)

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


def _item(number: _Number) -> Any:
    return number.over if number.is_whole or number.dtype == torch.bool else None


def _plain(number: _Number) -> Any:
    """A number that Python itself has to get: none that is symbolic."""
    value = _item(number)
    return value if isinstance(value, int) else None


def _bool(number: _Number) -> bool | None:
    value = _item(number)
    return None if value is None else bool(value)


_READERS: Mapping[str, Callable[[_Number], Any]] = {
    "item": _item,
    "__bool__": _bool,
    "__int__": _plain,
    "__index__": _plain,
}
_CASTS = ("to", "long", "int", "clone", "detach")


def _cast(number: _Number, dtype: torch.dtype) -> _Number | None:
    if dtype in WHOLE and (number.under == 1 or number.is_whole):
        return _Number(number.over, dtype)
    return number if dtype == number.dtype else None


def _added(one: _Number, other: _Number) -> _Number | None:
    if one.under != 1 and other.under != 1:
        return None
    if one.under == 1 and other.under != 1:
        one, other = other, one
    over = one.over + other.over * one.under
    return _Number(over, one.dtype, one.under, one.error + other.error)


def _negated(one: _Number) -> _Number:
    return _Number(-one.over, one.dtype, one.under, one.error)


def _subtracted(one: _Number, other: _Number) -> _Number | None:
    return _added(one, _negated(other))


def _multiplied(one: _Number, other: _Number) -> _Number | None:
    if one.is_whole and other.is_whole:
        return _Number(one.over * other.over, one.dtype)
    return None


def _divided(one: _Number, other: _Number) -> _Number | None:
    exact = one.is_whole and _largest(one.over) < EXACT
    if not exact or not other.is_whole or not isinstance(other.over, int) or other.over < 1:
        return None
    return _Number(one.over, torch.float32, other.over)


def _floor_divided(one: _Number, other: _Number) -> _Number | None:
    if one.is_whole and other.is_whole and isinstance(other.over, int) and other.over > 0:
        return _Number(one.over // other.over, one.dtype)
    return None


def _larger(one: _Number, other: _Number) -> _Number | None:
    are_whole = one.is_whole and other.is_whole
    return _Number(torch.sym_max(one.over, other.over), one.dtype) if are_whole else None


def _smaller(one: _Number, other: _Number) -> _Number | None:
    are_whole = one.is_whole and other.is_whole
    return _Number(torch.sym_min(one.over, other.over), one.dtype) if are_whole else None


def _floored(one: _Number) -> _Number | None:
    return _Number(one.over // one.under, one.dtype) if _is_near(one) else None


def _raised(one: _Number) -> _Number | None:
    return _Number(-(-one.over // one.under), one.dtype) if _is_near(one) else None


def _is_near(number: _Number) -> bool:
    """Whether what fp32 holds lies between the same whole numbers, or is the same one."""
    return number.error * number.under < 0.5


def _compared(compare: Callable[[Any, Any], Any]) -> Callable[[_Number, _Number], _Number | None]:
    def found(one: _Number, other: _Number) -> _Number | None:
        if not (one.is_whole and other.is_whole):
            return None
        return _Number(compare(one.over, other.over), torch.bool)

    return found


def _turned(rule: Callable[[_Number, _Number], _Number | None]) -> Callable[..., _Number | None]:
    return lambda one, other: rule(other, one)


_RULES: dict[str, Callable[..., _Number | None]] = {
    "neg": _negated,
    "ceil": _raised,
    "floor": _floored,
    "maximum": _larger,
    "minimum": _smaller,
}
for _name, _rule in {
    "add": _added,
    "sub": _subtracted,
    "mul": _multiplied,
    "div": _divided,
    "floordiv": _floor_divided,
}.items():
    for _spelling in (_name, f"__{_name}__"):
        _RULES[_spelling] = _rule
    _RULES[f"__r{_name}__"] = _turned(_rule)
_RULES |= {
    "rsub": _turned(_subtracted),
    "true_divide": _divided,
    "__truediv__": _divided,
    "floor_divide": _floor_divided,
}
for _name, _compare in {
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
}.items():
    _RULES[_name] = _RULES[f"__{_name}__"] = _compared(_compare)


def _checked(number: _Number, dtype: torch.dtype) -> _Number | None:
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
