"""Constants and casts that forms are made of."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import onnx
import onnx_ir as ir
from onnxscript import opset23 as op

FLOAT, DOUBLE = ir.DataType.FLOAT, ir.DataType.DOUBLE
HALVES = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
REALS = (FLOAT, DOUBLE, *HALVES)
INT32, INT64, BOOL = ir.DataType.INT32, ir.DataType.INT64, ir.DataType.BOOL
UINT8 = ir.DataType.UINT8
COMPARED = (FLOAT, DOUBLE, ir.DataType.FLOAT16, INT32, INT64)
"""Dtypes that all kernels of comparisons take; the others are cast to a wider one."""


def scalar(value: float, dtype: ir.DataType = FLOAT) -> Any:
    """A number as a constant of ONNX."""
    return op.Constant(value=onnx.helper.make_tensor("value", int(dtype), [], [value]))


def ints(*values: int) -> Any:
    return op.Constant(value_ints=list(values))


def in_fp32(formula: Callable[..., Any]) -> Callable[..., Any]:
    """Compute a formula of 16-bit values, which come first, in fp32."""

    @functools.wraps(formula)
    def widened(*values: Any, **options: Any) -> Any:
        dtype = values[0].dtype
        if dtype not in HALVES:
            return formula(*values, **options)
        wide = [cast(v, FLOAT) if isinstance(v, ir.Value) else v for v in values]
        return op.Cast(formula(*wide, **options), to=int(dtype))

    return widened


def cast(x: ir.Value, dtype: ir.DataType) -> Any:
    """A cast that knows its dtype and shape at once."""
    if x.dtype == dtype:
        return x
    found = op.Cast(x, to=int(dtype))
    found.dtype, found.shape = dtype, x.shape
    return found


def like(x: Any, value: float) -> Any:
    """A number in the dtype of `x`, which only inputs of the translated op know by now."""
    return op.CastLike(scalar(value), x) if x.dtype is None else scalar(value, x.dtype)


def value(x: Any, other: Any) -> Any:
    """A number or a tensor, as a tensor of the dtype of `other`."""
    if not isinstance(x, ir.Value):
        return like(other, x)
    return op.CastLike(x, other) if other.dtype is None else cast(x, other.dtype)


def compared(x: Any) -> Any:
    """The value in a dtype that kernels compare, which holds all of its values."""
    if x.dtype in COMPARED:
        return x
    wide = FLOAT if x.dtype in HALVES else INT64 if x.dtype == ir.DataType.UINT32 else INT32
    return cast(x, wide)


def pair(x: Any, y: Any) -> tuple[Any, Any]:
    """Two operands in one dtype: that of a number follows the tensor, or is fp32."""
    if isinstance(y, float) and x.dtype not in REALS:
        x = cast(x, FLOAT)
    if isinstance(y, ir.Value) and y.dtype in REALS and x.dtype not in REALS:
        x = cast(x, y.dtype)
    return x, value(y, x)


def length(x: Any, dim: int) -> Any:
    """How many elements there are along a dimension, as a list of one."""
    dim %= max(len(x.shape), 1)
    return op.Shape(x, start=dim, end=dim + 1)


def flat(x: Any) -> Any:
    """All elements in one row."""
    row = op.Reshape(x, ints(-1))
    row.dtype, row.shape = x.dtype, ir.Shape([None])
    return row


def axes_of(x: Any, dim: int | Sequence[int] | None) -> list[int]:
    rank = len(x.shape)
    dims = [dim] if isinstance(dim, int) else dim or range(rank)
    return sorted({axis % rank for axis in dims})
