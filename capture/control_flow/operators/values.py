"""Convert Python values that pass through structured control flow."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import SymBool, SymFloat, SymInt, Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.types import py_sym_types

from enginecast.capture.control_flow.operators.sites import Site


class Undefined:
    """Placeholder for a name that is not bound on the path taken."""

    def __repr__(self) -> str:
        return "UNDEFINED"


UNDEFINED = Undefined()


def is_open(value: object) -> bool:
    """Whether a predicate's value is unknown while tracing.

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
    """`bool(value)`; a zero-dim boolean tensor or a SymBool if it is open."""
    if not is_open(value):
        return bool(value)
    if isinstance(value, Tensor):
        value = scalar(value)
        return value if value.dtype == torch.bool else value != 0
    return value if isinstance(value, SymBool) else value != 0


def as_predicate(value: Any) -> Tensor:
    """The predicate as a zero-dim boolean tensor."""
    value = truth(value)
    if isinstance(value, Tensor):
        return value
    if isinstance(value, SymBool):
        return torch.scalar_tensor(torch.sym_ite(value, 1, 0), dtype=torch.int64) != 0
    return torch.full((), value, dtype=torch.bool)


def scalar(value: Tensor) -> Tensor:
    """A tensor of one element without its dimensions."""
    return value.reshape(()) if value.dim() else value


def scalar_dtype(value: object) -> torch.dtype | None:
    """The dtype of the tensor that stands for a Python number; None for anything else."""
    if isinstance(value, bool | SymBool):
        return torch.bool
    if isinstance(value, int | SymInt):
        return torch.int64
    return torch.get_default_dtype() if isinstance(value, float | SymFloat) else None


def sizes(value: object) -> list[str]:
    """The shape of a tensor as text, which compares without a guard; a number has none."""
    return [str(size) for size in value.shape] if isinstance(value, Tensor) else []


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
class Leaf:
    """The common form of one value of two paths."""

    constant: Any = None
    """The value, if both paths agree."""
    shape: tuple[Any, ...] = ()
    dtype: torch.dtype | None = None
    """Dtype of the tensor that represents it; None: it is constant."""

    def tensor(self, value: Any) -> Tensor:
        """The tensor that a path returns for this value."""
        assert self.dtype is not None
        if value is UNDEFINED:  # read later only where Python would raise NameError
            return torch.zeros(self.shape, dtype=self.dtype)
        return as_tensor(value, self.dtype)


def reconcile(site: Site, name: str, one: Any, other: Any) -> Leaf:
    """The common form of a value after either path.

    Raises:
        RewriteRefused: no tensor can represent both values.
    """
    if one is other:
        return Leaf(one)
    bound = [value for value in (one, other) if value is not UNDEFINED]
    tensors = [value for value in bound if isinstance(value, Tensor)]
    dtypes = [value.dtype if isinstance(value, Tensor) else scalar_dtype(value) for value in bound]
    if not any(isinstance(value, (Tensor, *py_sym_types)) for value in bound):
        is_same = len(bound) == 2 and type(one) is type(other) and one == other
        if is_same or dtypes == [None]:
            return Leaf(bound[0])
    known = [dtype for dtype in dtypes if dtype is not None]
    if len(known) < len(bound):
        raise site.refuse(f"{name} is {_kind(one)} on one path and {_kind(other)} on the other")
    if len(tensors) == 2 and one.dtype != other.dtype:
        raise site.refuse(f"{name} is {one.dtype} on one path and {other.dtype} on the other")
    if len({value.dim() if isinstance(value, Tensor) else 0 for value in bound}) > 1:
        raise site.refuse(f"{name} has {_kind(one)} on one path and {_kind(other)} on the other")
    dtype = torch.promote_types(known[0], known[-1])
    if any(value.dtype != dtype for value in tensors):
        raise site.refuse(f"{name} is {_kind(one)} on one path, {_kind(other)} on the other")
    return Leaf(shape=tuple(tensors[0].shape) if tensors else (), dtype=dtype)


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of {value.dtype} {list(value.shape)}"
    return "not bound" if value is UNDEFINED else f"{type(value).__name__} {value!r:.40}"
