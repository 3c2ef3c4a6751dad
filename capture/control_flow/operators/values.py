"""What Python values become when they go through structured control flow."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import SymBool, SymFloat, SymInt, Tensor
from torch._prims_common import get_higher_dtype
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from enginecast.capture.control_flow.operators.sites import Site


class Undefined:
    """Stands for a name that was not bound on the way that was taken."""

    def __repr__(self) -> str:
        return "UNDEFINED"


UNDEFINED = Undefined()


def is_open(value: object) -> bool:
    """Whether a predicate's value cannot be known while tracing.

    A size whose truth follows from the range of its dimension is known.
    """
    if isinstance(value, FakeTensor):
        return value.constant is None
    if isinstance(value, SymInt | SymFloat):
        value = value != 0
    if isinstance(value, SymBool):
        inverse = torch.sym_not(value)
        return not (statically_known_true(value) or statically_known_true(inverse))
    return False


def truth(value: Any) -> Any:
    """`bool(value)`, as a boolean of zero dimensions or a SymBool where it is open."""
    if not is_open(value):
        return bool(value)
    if isinstance(value, Tensor):
        flat = value.reshape(()) if value.dim() else value
        return flat if flat.dtype == torch.bool else flat != 0
    return value if isinstance(value, SymBool) else value != 0


def as_predicate(value: Any) -> Tensor:
    """A boolean tensor of zero dimensions."""
    value = truth(value)
    if isinstance(value, Tensor):
        return value
    if isinstance(value, SymBool):
        return torch.scalar_tensor(torch.sym_ite(value, 1, 0), dtype=torch.int64) != 0
    return torch.full((), value, dtype=torch.bool)


def scalar_dtype(value: object) -> torch.dtype | None:
    """The dtype of the tensor that stands for a Python number; None for anything else."""
    if isinstance(value, bool | SymBool):
        return torch.bool
    if isinstance(value, int | SymInt):
        return torch.int64
    if isinstance(value, float | SymFloat):
        return torch.get_default_dtype()
    return None


def wider(one: torch.dtype, other: torch.dtype) -> torch.dtype:
    """The dtype that two numbers have in common."""
    found = get_higher_dtype(one, other)
    assert found is not None
    return found


def as_tensor(value: Any, dtype: torch.dtype) -> Tensor:
    """A tensor as it is, a number as a tensor of zero dimensions."""
    if isinstance(value, Tensor):
        return value
    if isinstance(value, SymBool):
        return as_predicate(value).to(dtype)
    if isinstance(value, SymInt | SymFloat):
        number: Any = value
        return torch.scalar_tensor(number, dtype=dtype)
    return torch.full((), value, dtype=dtype)


@dataclass(frozen=True)
class Like:
    """What a tensor looks like."""

    shape: tuple[Any, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Leaf:
    """What one value of two ways becomes."""

    constant: Any = None
    """The value itself, where both ways agree."""
    like: Like | None = None
    """What the tensor that stands for it looks like; None: it is constant."""

    def tensor(self, value: Any) -> Tensor:
        """What a way returns for this value."""
        assert self.like is not None
        if value is UNDEFINED:  # read later only where Python would raise NameError
            return torch.zeros(self.like.shape, dtype=self.like.dtype)
        return as_tensor(value, self.like.dtype)


def reconcile(site: Site, name: str, one: Any, other: Any) -> Leaf:
    """What a value is after either way.

    Raises:
        RewriteRefused: no tensor can stand for both.
    """
    if one is other or (one is UNDEFINED and scalar_dtype(other) is None and _fixed(other)):
        return Leaf(constant=other)
    if other is UNDEFINED and scalar_dtype(one) is None and _fixed(one):
        return Leaf(constant=one)
    if type(one) is type(other) and _fixed(one) and one == other:
        return Leaf(constant=one)
    first, second = _dtype(one, other), _dtype(other, one)
    if first is None or second is None:
        raise site.refuse(f"{name} is {_kind(one)} one way and {_kind(other)} the other")
    return _tensor(site, name, (one, first), (other, second))


def _tensor(
    site: Site, name: str, one: tuple[Any, torch.dtype], other: tuple[Any, torch.dtype]
) -> Leaf:
    dtype = one[1]
    if one[1] != other[1]:
        if isinstance(one[0], Tensor) and isinstance(other[0], Tensor):
            raise site.refuse(f"{name} is {one[1]} one way and {other[1]} the other")
        dtype = wider(one[1], other[1])
    ranks = {value.dim() if isinstance(value, Tensor) else 0 for value in _bound(one, other)}
    if len(ranks) > 1:
        raise site.refuse(f"{name} has {_kind(one[0])} one way and {_kind(other[0])} the other")
    for value in _bound(one, other):
        if isinstance(value, Tensor):
            if value.dtype != dtype:
                raise site.refuse(f"{name} is {_kind(one[0])} one way, {_kind(other[0])} the other")
            return Leaf(like=Like(tuple(value.shape), dtype))
    return Leaf(like=Like((), dtype))


def _bound(*pairs: tuple[Any, torch.dtype]) -> list[Any]:
    return [value for value, _ in pairs if value is not UNDEFINED]


def _dtype(value: Any, other: Any) -> torch.dtype | None:
    if value is UNDEFINED:
        value = other
    return value.dtype if isinstance(value, Tensor) else scalar_dtype(value)


def _fixed(value: Any) -> bool:
    """Whether it can be compared by `==` and passed on as it is."""
    return not isinstance(value, Tensor | SymInt | SymFloat | SymBool)


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of {value.dtype} {list(value.shape)}"
    return "not bound" if value is UNDEFINED else f"{type(value).__name__} {value!r:.40}"
