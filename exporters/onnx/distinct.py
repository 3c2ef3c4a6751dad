"""Translations of what counts equal elements: distinct ones, the most frequent, a rounded decimal.

ONNX's Unique takes all NaN for one element, where torch takes each for one of its own.  torch.onnx
begins consecutive ones with the largest of int32, which may be the first element itself.
"""

import math
from typing import Any

import onnx_ir as ir
from onnxscript import opset23 as op
from onnxscript.function_libs.torch_lib.ops import core

from enginecast.exporters.onnx.ordered import BOOL, INT64, at_place, compared, ints, length, ordered
from enginecast.exporters.onnx.stable import REALS, STABLE, like
from enginecast.passes.ir.effects import aten


@STABLE.rule(aten._unique2.default)
def _unique(
    x: Any, sorted: bool = True, return_inverse: bool = False, return_counts: bool = False
) -> tuple[Any, Any, Any]:
    if x.dtype not in REALS:
        result: tuple[Any, Any, Any] = core.aten__unique2(x, sorted, return_inverse, return_counts)
        return result
    flat = _flat(x)
    rows, places = ordered(flat, length(flat, 0), 0, largest=False)
    found, numbers, counts = _runs(rows)
    back = op.ScatterElements(op.Expand(ints(0), op.Shape(places)), places, numbers, axis=0)
    return found, op.Reshape(back, op.Shape(x), allowzero=1), counts


@STABLE.rule(aten.unique_dim.default)
def _unique_along(
    x: Any,
    dim: int,
    sorted: bool = True,
    return_inverse: bool = False,
    return_counts: bool = False,
) -> tuple[Any, Any, Any]:
    if len(x.shape) == 1:
        same: tuple[Any, Any, Any] = _unique(x, sorted, return_inverse, return_counts)
        return same
    found: tuple[Any, Any, Any] = core.aten_unique_dim(
        x, dim, sorted, return_inverse, return_counts
    )
    return found


@STABLE.rule(aten.unique_consecutive.default)
def _unique_consecutive(
    x: Any, return_inverse: bool = False, return_counts: bool = False, dim: int | None = None
) -> tuple[Any, Any, Any]:
    if dim is not None and len(x.shape) > 1:
        raise ValueError("ONNX compares elements, and no slices along a dimension")
    found, numbers, counts = _runs(_flat(x))
    return found, op.Reshape(numbers, op.Shape(x), allowzero=1), counts


def _flat(x: Any) -> Any:
    flat = op.Reshape(x, ints(-1))
    flat.dtype, flat.shape = x.dtype, ir.Shape([None])
    return flat


def _runs(rows: Any) -> tuple[Any, Any, Any]:
    """The first of each run of equal elements, the run's number for each, and their lengths."""
    zero, one, end = ints(0), ints(1), ints((1 << 63) - 1)
    count = op.Shape(rows)
    differs = op.Not(op.Equal(op.Slice(rows, one, end, zero), op.Slice(rows, zero, ints(-1), zero)))
    first = op.Expand(op.Cast(one, to=int(BOOL)), op.Min(count, one))
    begins = op.Concat(first, differs, axis=0)
    begins.dtype = BOOL
    numbers = op.Sub(op.CumSum(op.Cast(begins, to=int(INT64)), op.Constant(value_int=0)), one)
    along = op.Range(op.Constant(value_int=0), op.Squeeze(count), op.Constant(value_int=1))
    starts = op.Compress(along, begins, axis=0)
    ends = op.Slice(op.Concat(starts, count, axis=0), one, end, zero)
    lengths = op.Sub(ends, op.Slice(starts, zero, op.Shape(ends), zero))
    return op.Compress(rows, begins, axis=0), numbers, lengths


@STABLE.rule(aten.mode.default)
def _mode(x: Any, dim: int = -1, keepdim: bool = False) -> tuple[Any, Any]:
    """The smallest of the most frequent elements of each row, and where it lies."""
    if not x.shape:
        return op.Identity(x), op.Constant(value_int=0)
    axis = dim % len(x.shape)
    _, places = ordered(x, length(x, dim), dim, largest=False)
    rows = op.GatherElements(compared(x), places, axis=axis)
    same = op.Equal(op.Unsqueeze(rows, ints(axis)), op.Unsqueeze(rows, ints(axis + 1)))
    counts = op.ReduceSum(op.Cast(same, to=int(INT64)), ints(axis + 1), keepdims=0)
    place = op.GatherElements(places, op.ArgMax(counts, axis=axis, keepdims=1), axis=axis)
    return at_place(x, place, axis, keepdim)


@STABLE.rule(aten.nanmedian.dim)
def _nanmedian_along(x: Any, dim: int, keepdim: bool = False) -> tuple[Any, Any]:
    """The lower one of two among those that are numbers."""
    if not x.shape:
        return op.Identity(x), op.Constant(value_int=0)
    axis = dim % len(x.shape)
    _, places = ordered(x, length(x, dim), dim, largest=False)
    one, two = ints(1), ints(2)
    if x.dtype in REALS:
        numbers = op.Cast(op.Not(op.IsNaN(x)), to=int(INT64))
        count = op.ReduceSum(numbers, ints(axis), keepdims=1)
    else:
        wide = op.Expand(one, op.Shape(x))
        count = op.ReduceSum(wide, ints(axis), keepdims=1)
    middle = op.Div(op.Sub(op.Max(count, one), one), two)
    place = op.GatherElements(places, middle, axis=axis)
    return at_place(x, place, axis, keepdim)


@STABLE.rule(aten.nanmedian.default)
def _nanmedian(x: Any) -> Any:
    return _nanmedian_along(_flat(x), 0)[0]


@STABLE.rule(aten.round.decimals)
def _round_to(x: Any, *, decimals: int = 0) -> Any:
    """Multiplied before and divided after, or the other way round, as in torch's kernel."""
    if x.dtype not in REALS:
        return op.Identity(x)
    power = like(x, math.pow(10, abs(decimals)))
    if decimals < 0:
        return op.Mul(op.Round(op.Div(x, power)), power)
    return op.Div(op.Round(op.Mul(x, power)), power)
