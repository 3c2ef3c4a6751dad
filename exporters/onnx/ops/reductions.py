"""Operators of `aten` that read rows: reductions, sums so far, orders, counts of equal elements.

ONNX leaves open what becomes of NaN, which torch takes for the largest value
(microsoft/onnxruntime#10514).  ONNX Runtime (1.31, CPU) compares some integers beyond 32 bits
wrongly in Max, Min, Clip, Sign, ReduceMax and ReduceMin (#25280, #32475: its Eigen, with SSE2):
here they are chosen by comparisons.  The mean of nothing is 0 there, and its largest element the
smallest of its dtype.
"""

import math
import operator
import re
from collections.abc import Sequence
from typing import Any

import onnx_ir as ir
import torch
from onnxscript import opset23 as op
from onnxscript.function_libs.torch_lib.ops import core as torch_core
from torch import Tensor
from torch.fx import Node

from enginecast.exporters.onnx.ops.registry import (
    READERS,
    form,
    refuse,
    rewrite,
    torch_form,
    trace,
)
from enginecast.exporters.onnx.ops.values import (
    BOOL,
    DOUBLE,
    FLOAT,
    HALVES,
    INT32,
    INT64,
    REALS,
    axes_of,
    cast,
    compared,
    flat,
    ints,
    length,
    like,
)
from enginecast.passes.ir.base import ProgramView
from enginecast.passes.ir.edit import first_input, shape_of
from enginecast.passes.ir.effects import aten
from enginecast.passes.ir.match import is_call

# Whether, how many, how much


@form(aten.any.default, aten.any.dim, aten.any.dims)
def _any(x: Any, dim: int | Sequence[int] | None = None, keepdim: bool = False) -> Any:
    """Whether there is one, by counting; the largest of no numbers would be true."""
    found = x if x.dtype == BOOL else op.Not(op.Equal(x, like(x, 0)))
    if not x.shape:
        return op.Identity(found)
    counted = op.Cast(found, to=int(INT64))
    total = op.ReduceSum(counted, ints(*axes_of(x, dim)), keepdims=int(keepdim))
    return op.Greater(total, op.Constant(value_int=0))


@form(aten.mean.default, aten.mean.dim)
def _mean(
    x: Any,
    dim: int | Sequence[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: int | None = None,
) -> Any:
    """Not a sum divided by a count: in fp16 the sum leaves its range."""
    x = x if dtype in (None, -1) else cast(x, ir.DataType(dtype))
    if not x.shape:
        return op.Identity(x)
    axes = [dim] if isinstance(dim, int) else dim or axes_of(x, dim)
    return _nan_of_nothing(x, dim, op.ReduceMean(x, ints(*axes), keepdims=int(keepdim)))


@form(aten.var.correction)
def _var(x: Any, dim: Any = None, *, correction: float | None = None, keepdim: bool = False) -> Any:
    return _nan_of_nothing(x, dim, torch_core.aten_var_correction(x, dim, correction, keepdim))


@form(aten.std.correction)
def _std(x: Any, dim: Any = None, *, correction: float | None = None, keepdim: bool = False) -> Any:
    return _nan_of_nothing(x, dim, torch_core.aten_std_correction(x, dim, correction, keepdim))


def _nan_of_nothing(x: Any, dim: Any, found: Any) -> Any:
    axes = axes_of(x, dim)
    if not any(may_be_nothing(x.shape[axis]) for axis in axes):
        return found
    count = op.ReduceProd(op.Gather(op.Shape(x), ints(*axes)), keepdims=0)
    is_nothing = op.Equal(count, op.Constant(value_int=0))
    return op.Where(is_nothing, like(x, math.nan), found)


def may_be_nothing(size: Any) -> bool:
    """Not the size of an input, which is one at least."""
    return size == 0 if isinstance(size, int) else not re.fullmatch(r"s\d+", str(size.value))


_MOVES = frozenset({"Expand", "Identity", "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze"})
"""What changes no value."""


@form(aten.sum.dim_IntList)
def _sum_along(x: Any, dim: Any = None, keepdim: bool = False, *, dtype: int | None = None) -> Any:
    """ONNX Runtime (1.31) adds integers in fp64, so a sum of products, as of a hash, loses digits.

    The low and the high 32 bits are added apart, and so the sum wraps around, as torch's does.
    """
    if x.dtype != INT64 or not x.shape or dtype not in (None, -1, int(INT64)) or not _is_product(x):
        return torch_core.aten_sum_dim_IntList(x, dim, keepdim, -1 if dtype is None else dtype)
    axes = [] if dim is None else [ints(*([dim] if isinstance(dim, int) else dim))]
    unit = op.Constant(value_int=1 << 32)
    low = op.Mod(x, unit)
    high = op.Div(op.Sub(x, low), unit)
    totals = (op.ReduceSum(part, *axes, keepdims=int(keepdim)) for part in (high, low))
    return op.Add(op.Mul(next(totals), unit), next(totals))


def _is_product(x: Any) -> bool:
    """Whether a value is a product, if moved: other integers are far from 2**53."""
    node = x.producer()
    while node is not None and node.op_type in _MOVES:
        node = node.inputs[0].producer()
    return node is not None and node.op_type == "Mul"


@form(aten.prod.dim_int)
def _prod(x: Any, dim: int, keepdim: bool = False, *, dtype: int = -1) -> Any:
    """ReduceProd of integers saturates where torch's overflows."""
    wanted = x.dtype if dtype == -1 else ir.DataType(dtype)
    if wanted in REALS:
        return op.ReduceProd(cast(x, wanted), ints(dim), keepdims=int(keepdim))
    if not x.shape:
        return op.Cast(x, to=int(INT64))
    rows = _cumprod(x, dim)
    one = op.Constant(value_int=1)  # the product of nothing
    rows = op.Pad(rows, ints(1, 0), one, ints(dim))
    last = op.Slice(rows, ints(-1), ints(1 << 62), ints(dim))
    return last if keepdim else op.Squeeze(last, ints(dim))


@form(aten.prod.default)
def _prod_of_all(x: Any, *, dtype: int = -1) -> Any:
    flat = op.Reshape(x, ints(-1))
    sizes = list(x.shape)
    known = all(isinstance(size, int) for size in sizes)
    flat.dtype, flat.shape = x.dtype, ir.Shape([math.prod(sizes) if known else None])
    return _prod(flat, 0, dtype=dtype)


# Sums so far


@form(aten.cumsum.default, readers=[reader for reader in READERS if reader != "tensorrt"])
def _cumsum(x: Any, dim: int, *, dtype: int | None = None) -> Any:
    """ONNX Runtime rounds each partial sum; torch keeps them in a wider dtype."""
    return _summed(x, dim, dtype, DOUBLE)


@form(aten.cumsum.default, readers=["tensorrt"])
def _cumsum_in_fp32(x: Any, dim: int, *, dtype: int | None = None) -> Any:
    """TensorRT has no float64; on a GPU, torch adds in fp32 as well."""
    return _summed(x, dim, dtype, FLOAT)


def _summed(x: Any, dim: int, dtype: int | None, widest: ir.DataType) -> Any:
    wide = widest if x.dtype == FLOAT else FLOAT if x.dtype in HALVES else None
    if wide is None or dtype not in (None, -1, int(x.dtype)) or not x.shape:
        return torch_core.aten_cumsum(x, dim, -1 if dtype is None else dtype)
    total = op.CumSum(cast(x, wide), op.Constant(value_int=dim))
    return op.Cast(total, to=int(x.dtype))


LONGEST = 1 << 20
"""Elements of a row whose length varies that a scan reaches."""


@form(aten.cumprod.default)
def _cumprod(x: Any, dim: int, *, dtype: int = -1) -> Any:
    if dtype != -1:
        x = cast(x, ir.DataType(dtype))
    elif x.dtype not in REALS:
        x = cast(x, INT64)
    if not x.shape:
        return op.Identity(x)
    dtype_of_result = x.dtype
    if x.dtype == FLOAT:  # as torch does
        x = cast(x, ir.DataType.DOUBLE)
    elif x.dtype in HALVES:
        x = cast(x, FLOAT)
    # By doubling (Hillis and Steele, 1986): log n steps, each of which takes in what comes earlier.
    size = x.shape[dim]
    longest = size if isinstance(size, int) else LONGEST
    axis, end, found = ints(dim % len(x.shape)), length(x, dim), x
    for step in (1 << bit for bit in range(max(longest - 1, 0).bit_length())):
        earlier = op.Pad(found, ints(step, 0), like(x, 1), axis)
        found = op.Mul(op.Slice(earlier, ints(0), end, axis), found)
    return found if x.dtype == dtype_of_result else op.Cast(found, to=int(dtype_of_result))


refuse(
    *(aten.logcumsumexp.default, aten.cummax.default, aten.cummin.default, aten.kthvalue.default),
    reason="it keeps no running extremes",
)

# Extremes and their places


def _place(x: Any, dim: int | None, keepdim: bool, *, largest: bool) -> Any:
    """Where the first of the largest or smallest elements is, or else the first NaN."""
    if not x.shape:
        return op.Constant(value_int=0)
    wide, axis = compared(x), dim or 0
    if dim is None:
        wide, keepdim = op.Reshape(wide, ints(-1)), False
    find = op.ArgMax if largest else op.ArgMin
    place = find(wide, axis=axis, keepdims=int(keepdim))
    return _first_hole(wide, place, axis, keepdim) if x.dtype in REALS else place


def _first_hole(x: Any, place: Any, axis: int, keepdim: bool) -> Any:
    """A place along a dimension, or else where the first NaN is."""
    holes = op.Cast(op.IsNaN(x), to=int(INT32))
    some = op.Cast(op.ReduceMax(holes, ints(axis), keepdims=int(keepdim)), to=int(BOOL))
    return op.Where(some, op.ArgMax(holes, axis=axis, keepdims=int(keepdim)), place)


@form(aten.argmax.default)
def _argmax(x: Any, dim: int | None = None, keepdim: bool = False) -> Any:
    return _place_of_all(x, dim, keepdim, largest=True)


@form(aten.argmin.default)
def _argmin(x: Any, dim: int | None = None, keepdim: bool = False) -> Any:
    return _place_of_all(x, dim, keepdim, largest=False)


def _place_of_all(x: Any, dim: int | None, keepdim: bool, *, largest: bool) -> Any:
    found = _place(x, dim, keepdim, largest=largest)
    if dim is not None or not keepdim or not x.shape:
        return found
    return op.Reshape(found, ints(*[1] * len(x.shape)))


def _extreme(x: Any, dim: int, keepdim: bool, *, largest: bool) -> tuple[Any, Any]:
    """The largest or smallest element along a dimension, and its place."""
    if not x.shape:
        return op.Identity(x), op.Constant(value_int=0)
    place = _place(x, dim, True, largest=largest)
    found = op.GatherElements(x, place, axis=dim)
    if keepdim:
        return found, place
    return op.Squeeze(found, ints(dim)), op.Squeeze(place, ints(dim))


@form(aten.max.dim)
def _max_dim(x: Any, dim: int, keepdim: bool = False) -> Any:
    return _extreme(x, dim, keepdim, largest=True)


@form(aten.min.dim)
def _min_dim(x: Any, dim: int, keepdim: bool = False) -> Any:
    return _extreme(x, dim, keepdim, largest=False)


def _reduce(x: Any, dims: Sequence[int], keepdim: bool, *, largest: bool) -> Any:
    """The largest or smallest element over dimensions; none of them stands for all."""
    if not x.shape:
        return op.Identity(x)
    rank = len(x.shape)
    axes = sorted({dim % rank for dim in dims} or range(rank))
    if x.dtype == INT64:
        for axis in axes:
            places = (op.ArgMax if largest else op.ArgMin)(x, axis=axis, keepdims=1)
            x = op.GatherElements(x, places, axis=axis)
        return x if keepdim else op.Squeeze(x, ints(*axes))
    wide = compared(x)
    find = op.ReduceMax if largest else op.ReduceMin
    found = find(wide, ints(*axes), keepdims=int(keepdim))
    if x.dtype not in REALS:
        return op.CastLike(found, x)
    holes = op.ReduceMax(op.Cast(op.IsNaN(wide), to=int(FLOAT)), ints(*axes), keepdims=int(keepdim))
    return op.CastLike(op.Where(op.Cast(holes, to=int(BOOL)), like(wide, math.nan), found), x)


@form(aten.amax.default, aten.max.default)
def _amax(x: Any, dim: Sequence[int] = (), keepdim: bool = False) -> Any:
    return _reduce(x, dim, keepdim, largest=True)


@form(aten.amin.default, aten.min.default)
def _amin(x: Any, dim: Sequence[int] = (), keepdim: bool = False) -> Any:
    return _reduce(x, dim, keepdim, largest=False)


# Orders


def ordered(x: Any, count: Any, dim: int, *, largest: bool) -> tuple[Any, Any]:
    """The first elements in order, equal ones in that of their places, and the places."""
    if not x.shape:
        return op.Identity(x), op.Constant(value_int=0)
    keys = compared(x)
    if keys.dtype in REALS:  # NaN comes as the largest
        keys = op.Where(op.IsNaN(keys), like(keys, math.inf), keys)
    _, places = op.TopK(keys, count, axis=dim, largest=int(largest), sorted=1)
    return op.GatherElements(x, places, axis=dim), places


@form(aten.sort.default)
def _sort(x: Any, dim: int = -1, descending: bool = False) -> Any:
    return ordered(x, length(x, dim), dim, largest=descending)


@form(aten.sort.stable)
def _stable_sort(
    x: Any, *, stable: bool | None = None, dim: int = -1, descending: bool = False
) -> Any:
    return _sort(x, dim, descending)


def _places(node: Node) -> int:
    """How many values the integers of one ascending row can have, where they are the places that
    topk chose, as those of the experts of each token; else 0.
    """
    source = first_input(node)
    if len(shape_of(source)) != 1 or len(node.args) > 1 or node.kwargs.get("descending"):
        return 0
    while is_call(source, aten.reshape.default, aten.view.default, aten.flatten.using_ints):
        source = first_input(source)
    if not is_call(source, operator.getitem) or source.args[1] != 1:
        return 0
    topk = first_input(source)
    if not is_call(topk, aten.topk.default):
        return 0
    dim: Any = topk.args[2] if len(topk.args) > 2 else topk.kwargs.get("dim", -1)
    size = shape_of(first_input(topk))[dim]
    return size if isinstance(size, int) else 0


@rewrite(
    *(aten.sort.default, aten.sort.stable),
    when=lambda node: bool(_places(node)),
    readers=("tensorrt",),
)
def _count_and_sort(program: ProgramView, node: Node) -> Node | None:
    """A mixture of experts sorts its tokens by expert, and TensorRT sorts 3840 elements at most.

    Each one's place is the number of those of smaller values, and of equal ones before it.
    """
    many = _places(node)

    def counted(x: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
        is_of = (x.unsqueeze(1) == torch.arange(many)).to(torch.int32)
        so_far = is_of.cumsum(0, dtype=torch.int32)
        total = is_of.sum(0, dtype=torch.int32)
        before = total.cumsum(0, dtype=torch.int32) - total
        place = ((so_far + before) * is_of).sum(1, dtype=torch.int32) - 1
        number = torch.ones_like(x).cumsum(0) - 1
        order = torch.zeros_like(x).scatter(0, place.to(torch.int64), number)
        return x.gather(0, order), order

    return trace(program, node, counted)


@form(aten.topk.default)
def _topk(x: Any, k: Any, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    count = ints(k) if isinstance(k, int) else op.Reshape(op.Cast(k, to=int(INT64)), ints(1))
    return ordered(x, count, dim, largest=largest)


@form(aten.median.dim)
def _median_dim(x: Any, dim: int = -1, keepdim: bool = False) -> Any:
    """The lower one of two; NaN, and where the first is, in a row that has some."""
    if not x.shape:
        return op.Identity(x), op.Constant(value_int=0)
    count = length(x, dim)
    middle = op.Div(op.Sub(count, ints(1)), ints(2))
    _, places = ordered(x, count, dim, largest=False)
    place = op.Gather(places, middle, axis=dim)
    if x.dtype in REALS:
        place = _first_hole(compared(x), place, dim, True)
    return _at_place(x, place, dim, keepdim)


def _at_place(x: Any, place: Any, dim: int, keepdim: bool) -> tuple[Any, Any]:
    """The element at a place of each row, and the place; `place` has a dimension of one."""
    found = op.GatherElements(x, place, axis=dim)
    if keepdim:
        return found, place
    return op.Squeeze(found, ints(dim)), op.Squeeze(place, ints(dim))


@form(aten.median.default)
def _median(x: Any) -> Any:
    return _median_dim(flat(x), 0)[0]


@form(aten.bucketize.Tensor)
def _bucketize(x: Any, boundaries: Any, *, out_int32: bool = False, right: bool = False) -> Any:
    return _searchsorted(boundaries, x, out_int32=out_int32, right=right, aligned=False)


@form(aten.searchsorted.Tensor)
def _searchsorted(
    boundaries: Any,
    x: Any,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Any = None,
    aligned: bool = True,
) -> Any:
    """How many boundaries are below each value; NaN is above all."""
    rank, bounds_dtype = len(boundaries.shape), boundaries.dtype
    if sorter is not None:
        boundaries = op.GatherElements(boundaries, sorter, axis=-1)
    if aligned and rank > 1:
        boundaries = op.Unsqueeze(boundaries, ints(-2))
    is_real = x.dtype in REALS or bounds_dtype in REALS
    dtype = FLOAT if is_real else INT64
    each, bounds = (
        op.Cast(op.Unsqueeze(x, ints(-1)), to=int(dtype)),
        op.Cast(boundaries, to=int(dtype)),
    )
    above = op.Greater if right or side == "right" else op.GreaterOrEqual
    below = op.Cast(op.Not(above(bounds, each)), to=int(INT64))
    count = op.ReduceSum(below, ints(-1), keepdims=0)
    return op.Cast(count, to=int(INT32)) if out_int32 else count


# Equal elements


@form(aten._unique2.default)
def _unique(
    x: Any, sorted: bool = True, return_inverse: bool = False, return_counts: bool = False
) -> tuple[Any, Any, Any]:
    if x.dtype not in REALS:
        result: tuple[Any, Any, Any] = torch_core.aten__unique2(
            x, sorted, return_inverse, return_counts
        )
        return result
    row = flat(x)
    rows, places = ordered(row, length(row, 0), 0, largest=False)
    found, numbers, counts = _runs(rows)
    back = op.ScatterElements(op.Expand(ints(0), op.Shape(places)), places, numbers, axis=0)
    return found, op.Reshape(back, op.Shape(x), allowzero=1), counts


@form(aten.unique_dim.default)
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
    found: tuple[Any, Any, Any] = torch_core.aten_unique_dim(
        x, dim, sorted, return_inverse, return_counts
    )
    return found


@form(aten.unique_consecutive.default)
def _unique_consecutive(
    x: Any, return_inverse: bool = False, return_counts: bool = False, dim: int | None = None
) -> tuple[Any, Any, Any]:
    if dim is not None and len(x.shape) > 1:
        raise ValueError("ONNX compares elements, and no slices along a dimension")
    found, numbers, counts = _runs(flat(x))
    return found, op.Reshape(numbers, op.Shape(x), allowzero=1), counts


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


def _has_one_bin(node: Node) -> bool:
    """Whether a histogram has one bin and takes its bounds from the values: all are in it."""
    given: tuple[Any, ...] = (*node.args[1:], *(100, 0, 0)[len(node.args) - 1 :])
    bins, low, high = given
    return bool(bins == 1 and low == high)


@torch_form(aten.histc.default, when=_has_one_bin)
def _all_of_them(x: Tensor, *_: float) -> Tensor:
    """A mixture of one expert counts its tokens so; ONNX has no bounds that come from values."""
    count = torch.ones_like(x, dtype=torch.int64).sum()
    return count.to(x.dtype).reshape(1)
