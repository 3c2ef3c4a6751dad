"""Translations of what compares values: extremes, sorts, scans.

ONNX leaves open what becomes of NaN, which torch takes for the largest value.  ONNX Runtime (1.31,
CPU) compares some integers beyond 32 bits wrongly in Max, Min, Clip, Sign, ReduceMax and ReduceMin:
here they are chosen by comparisons.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import onnx_ir as ir
from onnxscript import opset23 as op

from enginecast.exporters.onnx.stable import (
    FLOAT,
    HALVES,
    REALS,
    STABLE,
    cast,
    in_fp32,
    like,
    log_add,
    value,
)
from enginecast.passes.ir.effects import aten

LONGEST = 1 << 20
"""Elements of a row whose length varies that a scan reaches."""

INT32, INT64, BOOL = ir.DataType.INT32, ir.DataType.INT64, ir.DataType.BOOL
_COMPARED = (FLOAT, ir.DataType.DOUBLE, ir.DataType.FLOAT16, INT32, INT64)
"""Dtypes that all kernels here take; the others are cast to a wider one."""
_LOWEST = {INT32: -(1 << 31), INT64: -(1 << 63)}


def compared(x: Any) -> Any:
    """The value in a dtype that kernels compare, which holds all of its values."""
    if x.dtype in _COMPARED:
        return x
    wide = FLOAT if x.dtype in HALVES else INT64 if x.dtype == ir.DataType.UINT32 else INT32
    return cast(x, wide)


def ints(*values: int) -> Any:
    return op.Constant(value_ints=list(values))


def _choose(x: Any, y: Any, *, largest: bool) -> Any:
    """The larger or the smaller of each pair; `x` knows its dtype, and so does the result."""
    if x.dtype in REALS:
        found = (op.Max if largest else op.Min)(x, y)
    elif x.dtype == BOOL:
        found = (op.Or if largest else op.And)(x, y)
    else:
        wide = compared(x)
        other = cast(y, wide.dtype)
        takes = (op.Greater if largest else op.Less)(wide, other)
        found = op.CastLike(op.Where(takes, wide, other), x)
    found.dtype = x.dtype
    return found


@STABLE.rule(aten.maximum.default)
def _maximum(x: Any, y: Any) -> Any:
    return _choose(x, y, largest=True)


@STABLE.rule(aten.minimum.default)
def _minimum(x: Any, y: Any) -> Any:
    return _choose(x, y, largest=False)


@STABLE.rule(aten.fmax.default)
def _fmax(x: Any, y: Any) -> Any:
    return _besides_nan(x, y, largest=True)


@STABLE.rule(aten.fmin.default)
def _fmin(x: Any, y: Any) -> Any:
    return _besides_nan(x, y, largest=False)


def _besides_nan(x: Any, y: Any, *, largest: bool) -> Any:
    found = _choose(x, y, largest=largest)
    if x.dtype not in REALS:
        return found
    return op.Where(op.IsNaN(x), y, op.Where(op.IsNaN(y), x, found))


@STABLE.rule(aten.clamp.default, aten.clamp.Tensor, aten.hardtanh.default)
def _clamp(x: Any, min: Any = None, max: Any = None) -> Any:
    for bound in (min, max):
        if x.dtype not in REALS and _is_real(bound):
            x = cast(x, bound.dtype if isinstance(bound, ir.Value) else FLOAT)
    if x.dtype in REALS and not any(isinstance(bound, ir.Value) for bound in (min, max)):
        return op.Clip(x, *(None if bound is None else like(x, bound) for bound in (min, max)))
    if min is not None:
        x = _choose(x, value(min, x), largest=True)
    return x if max is None else _choose(x, value(max, x), largest=False)


def _is_real(bound: Any) -> bool:
    return isinstance(bound, float) or (isinstance(bound, ir.Value) and bound.dtype in REALS)


@STABLE.rule(aten.clamp_min.default, aten.clamp_min.Tensor)
def _clamp_min(x: Any, min: Any) -> Any:
    return _clamp(x, min)


@STABLE.rule(aten.clamp_max.default, aten.clamp_max.Tensor)
def _clamp_max(x: Any, max: Any) -> Any:
    return _clamp(x, None, max)


@STABLE.rule(aten.relu.default)
def _relu(x: Any) -> Any:
    return op.Relu(x) if x.dtype in REALS else _clamp(x, 0)


@STABLE.rule(aten.sign.default)
def _sign(x: Any) -> Any:
    """0 for NaN."""
    if x.dtype == BOOL:
        return op.Identity(x)
    wide, zero = compared(x), like(compared(x), 0)
    sides = [op.Cast(side(wide, zero), to=int(INT32)) for side in (op.Greater, op.Less)]
    return op.CastLike(op.Sub(*sides), x)


@STABLE.rule(aten.heaviside.default)
def _heaviside(x: Any, values: Any) -> Any:
    zero = like(x, 0)
    return op.Where(op.Equal(x, zero), values, op.CastLike(op.Greater(x, zero), x))


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


@STABLE.rule(aten.argmax.default)
def _argmax(x: Any, dim: int | None = None, keepdim: bool = False) -> Any:
    return _place_of_all(x, dim, keepdim, largest=True)


@STABLE.rule(aten.argmin.default)
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


@STABLE.rule(aten.max.dim)
def _max_dim(x: Any, dim: int, keepdim: bool = False) -> Any:
    return _extreme(x, dim, keepdim, largest=True)


@STABLE.rule(aten.min.dim)
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


@STABLE.rule(aten.amax.default)
def _amax(x: Any, dim: Sequence[int] = (), keepdim: bool = False) -> Any:
    return _reduce(x, dim, keepdim, largest=True)


@STABLE.rule(aten.amin.default)
def _amin(x: Any, dim: Sequence[int] = (), keepdim: bool = False) -> Any:
    return _reduce(x, dim, keepdim, largest=False)


@STABLE.rule(aten.max.default)
def _max(x: Any) -> Any:
    return _reduce(x, (), False, largest=True)


@STABLE.rule(aten.min.default)
def _min(x: Any) -> Any:
    return _reduce(x, (), False, largest=False)


def ordered(x: Any, count: Any, dim: int, *, largest: bool) -> tuple[Any, Any]:
    """The first elements in order, equal ones in that of their places, and the places."""
    if not x.shape:
        return op.Identity(x), op.Constant(value_int=0)
    keys = compared(x)
    if keys.dtype in REALS:  # NaN comes as the largest
        keys = op.Where(op.IsNaN(keys), like(keys, math.inf), keys)
    _, places = op.TopK(keys, count, axis=dim, largest=int(largest), sorted=1)
    return op.GatherElements(x, places, axis=dim), places


def length(x: Any, dim: int) -> Any:
    """How many elements there are along a dimension, as a list of one."""
    dim %= max(len(x.shape), 1)
    return op.Shape(x, start=dim, end=dim + 1)


@STABLE.rule(aten.sort.default)
def _sort(x: Any, dim: int = -1, descending: bool = False) -> Any:
    return ordered(x, length(x, dim), dim, largest=descending)


@STABLE.rule(aten.sort.stable)
def _stable_sort(
    x: Any, *, stable: bool | None = None, dim: int = -1, descending: bool = False
) -> Any:
    return _sort(x, dim, descending)


@STABLE.rule(aten.topk.default)
def _topk(x: Any, k: Any, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    count = ints(k) if isinstance(k, int) else op.Reshape(op.Cast(k, to=int(INT64)), ints(1))
    return ordered(x, count, dim, largest=largest)


@STABLE.rule(aten.kthvalue.default)
def _kthvalue(x: Any, k: int, dim: int = -1, keepdim: bool = False) -> Any:
    if not x.shape:
        return op.Identity(x), op.Constant(value_int=0)
    return tuple(
        _element(found, ints(k - 1), dim, keepdim)
        for found in ordered(x, ints(k), dim, largest=False)
    )


def _element(x: Any, place: Any, dim: int, keepdim: bool) -> Any:
    """The element of each row at one place."""
    found = op.Gather(x, place, axis=dim)
    return found if keepdim else op.Squeeze(found, ints(dim))


@STABLE.rule(aten.median.dim)
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
    return at_place(x, place, dim, keepdim)


def at_place(x: Any, place: Any, dim: int, keepdim: bool) -> tuple[Any, Any]:
    """The element at a place of each row, and the place; `place` has a dimension of one."""
    found = op.GatherElements(x, place, axis=dim)
    if keepdim:
        return found, place
    return op.Squeeze(found, ints(dim)), op.Squeeze(place, ints(dim))


@STABLE.rule(aten.median.default)
def _median(x: Any) -> Any:
    flat = op.Reshape(x, ints(-1))
    flat.dtype, flat.shape = x.dtype, ir.Shape([None])
    return _median_dim(flat, 0)[0]


@STABLE.rule(aten.bucketize.Tensor)
def _bucketize(x: Any, boundaries: Any, *, out_int32: bool = False, right: bool = False) -> Any:
    return _searchsorted(boundaries, x, out_int32=out_int32, right=right, aligned=False)


@STABLE.rule(aten.searchsorted.Tensor)
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


def _scan(
    rows: tuple[Any, ...], neutral: tuple[Any, ...], dim: int, join: Callable[..., tuple[Any, ...]]
) -> tuple[Any, ...]:
    """Join each element with all before it by doubling (Hillis and Steele, 1986): log n steps.

    Args:
        rows: tensors of one shape.
        neutral: for each, what changes nothing when it comes before.
        dim: along which.
        join: gets the tensors of what comes earlier and those of what comes later.
    """
    shape = rows[0].shape
    size = shape[dim]
    longest = size if isinstance(size, int) else LONGEST
    axis, end = ints(dim % len(shape)), length(rows[0], dim)
    for step in (1 << bit for bit in range(max(longest - 1, 0).bit_length())):
        pads = ints(step, 0)
        earlier = tuple(
            op.Slice(op.Pad(row, pads, nothing, axis), ints(0), end, axis)
            for row, nothing in zip(rows, neutral, strict=True)
        )
        rows = join(*earlier, *rows)
    return rows


@STABLE.rule(aten.logcumsumexp.default)
@in_fp32
def _logcumsumexp(x: Any, dim: int) -> Any:
    """Without a row of exp."""
    if not x.shape:
        return op.Identity(x)
    lowest = like(x, -math.inf)
    return _scan((x,), (lowest,), dim, lambda a, b: (log_add(b, a, math.e),))[0]


@STABLE.rule(aten.cumprod.default)
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
    found = _scan((x,), (like(x, 1),), dim, lambda a, b: (op.Mul(a, b),))[0]
    return found if x.dtype == dtype_of_result else op.Cast(found, to=int(dtype_of_result))


@STABLE.rule(aten.prod.dim_int)
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


@STABLE.rule(aten.prod.default)
def _prod_of_all(x: Any, *, dtype: int = -1) -> Any:
    flat = op.Reshape(x, ints(-1))
    sizes = list(x.shape)
    known = all(isinstance(size, int) for size in sizes)
    flat.dtype, flat.shape = x.dtype, ir.Shape([math.prod(sizes) if known else None])
    return _prod(flat, 0, dtype=dtype)


def _cumulative(x: Any, dim: int, *, largest: bool) -> tuple[Any, Any]:
    """The last of the extremes so far and its place; NaN stays."""
    if not x.shape:
        return op.Identity(x), op.Constant(value_int=0)
    wide = compared(x)
    is_real = wide.dtype in REALS
    lowest = -math.inf if is_real else _LOWEST[wide.dtype]
    first = lowest if largest else -lowest - (0 if is_real else 1)
    takes_later = op.GreaterOrEqual if largest else op.LessOrEqual

    def join(earlier: Any, places: Any, later: Any, later_places: Any) -> tuple[Any, Any]:
        takes = takes_later(later, earlier)
        if is_real:
            takes = op.And(
                op.Or(takes, op.IsNaN(later)), op.Or(op.IsNaN(later), op.Not(op.IsNaN(earlier)))
            )
        return op.Where(takes, later, earlier), op.Where(takes, later_places, places)

    along = op.Range(op.Constant(value_int=0), op.Squeeze(length(x, dim)), op.Constant(value_int=1))
    after = [axis for axis in range(1, len(x.shape) - dim % len(x.shape))]
    places = op.Unsqueeze(along, ints(*after)) if after else along
    places = op.Expand(places, op.Shape(x))
    neutral = (like(wide, first), op.Constant(value_int=0))
    found, places = _scan((wide, places), neutral, dim, join)
    return op.CastLike(found, x), places


@STABLE.rule(aten.cummax.default)
def _cummax(x: Any, dim: int) -> Any:
    return _cumulative(x, dim, largest=True)


@STABLE.rule(aten.cummin.default)
def _cummin(x: Any, dim: int) -> Any:
    return _cumulative(x, dim, largest=False)
