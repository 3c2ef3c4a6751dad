"""Convert Python values that pass through structured control flow."""

import itertools
import math
from dataclasses import dataclass
from types import CodeType
from typing import Any

import torch
from torch import SymBool, SymFloat, SymInt, Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.types import py_sym_types

from enginecast.capture.control_flow.operators.sites import Site
from enginecast.library_names import private

MOST_SIZES = 4096
"""Most sizes for which two expressions are compared one by one."""
_FUNCTIONS = {"math": math, "torch": torch, "max": max, "min": min}
"""What torch prints of sizes as Python code."""


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


def common_size(predicate: Any, one: Any, other: Any) -> Any:
    """An expression of the size on the path that `predicate` takes: `one` where it is true, and
    `other` where it is not; None where neither is right for all sizes in range.
    """
    if str(one) == str(other):
        return one
    test = predicate if isinstance(predicate, SymBool) else None
    nodes = [each.node for each in (one, other, test) if isinstance(each, py_sym_types)]
    symbols = sorted({symbol for node in nodes for symbol in node.expr.free_symbols}, key=str)
    known = [nodes[0].shape_env.var_to_range.get(symbol) for symbol in symbols]
    if any(each is None or not each.is_int or not each.upper.is_finite for each in known):
        return None
    ranges = [range(int(each.lower), int(each.upper) + 1) for each in known]
    if math.prod(map(len, ranges)) > MOST_SIZES:
        return None
    first, second, taken = map(_code, (one, other, test))
    fitting = [one, other]
    for sizes in itertools.product(*ranges):
        at = dict(zip(map(str, symbols), sizes, strict=True))
        if eval(first, dict(_FUNCTIONS), at) == eval(second, dict(_FUNCTIONS), at):
            continue
        is_true = None if test is None else bool(eval(taken, dict(_FUNCTIONS), at))
        right = None if is_true is None else one if is_true else other
        fitting = [each for each in fitting if each is right]
        if not fitting:
            return None
    return fitting[0]


def _code(value: Any) -> CodeType:
    """A number, or a symbolic one, as Python code over the names of its symbols."""
    expression = value.node.expr if isinstance(value, py_sym_types) else value
    plain: Any = private("torch.utils._sympy.printers.PythonPrinter", "a condition on sizes")
    return compile(str(plain().doprint(expression)), "<size>", "eval")


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
