"""Translations of what takes a diagonal, and of what puts values into places of a tensor.

torch.onnx says a diagonal as a product with a mask, which makes NaN of infinity, and the mean that
`scatter_reduce` computes as the last value alone; a source that has more than the places it
leaves to ONNX Runtime, which refuses it.
"""

import math
from typing import Any

import numpy as np
import onnx_ir as ir
from onnxscript import opset23 as op

from enginecast.exporters.onnx.ordered import BOOL, INT32, ints
from enginecast.exporters.onnx.stable import REALS, STABLE, cast, like
from enginecast.passes.ir.effects import aten

_REDUCTIONS = {"sum": "add", "prod": "mul", "amin": "min", "amax": "max"}
_UPDATES = {"add": "sum", "multiply": "prod"}
"""What `scatter` calls reductions."""


@STABLE.rule(aten.diagonal.default, aten.diagonal_copy.default)
def _diagonal(x: Any, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Any:
    """Elements of the two dimensions, flattened, at equal distances."""
    rank = len(x.shape)
    first, second = dim1 % rank, dim2 % rank
    others = [dim for dim in range(rank) if dim not in (first, second)]
    moved = op.Transpose(x, perm=[*others, first, second])
    height = op.Shape(x, start=first, end=first + 1)
    width = op.Shape(x, start=second, end=second + 1)
    zero, one, below, right = map(ints, (0, 1, max(-offset, 0), max(offset, 0)))
    left = [op.Sub(height, below), op.Sub(width, right)]
    count = op.Max(op.Min(*left), zero)
    start = op.Add(op.Mul(below, width), right)
    step = op.Add(width, one)
    along = op.Range(op.Constant(value_int=0), op.Squeeze(count), op.Constant(value_int=1))
    places = op.Add(start, op.Mul(along, step))
    sizes = [op.Shape(x, start=dim, end=dim + 1) for dim in others]
    shape = op.Concat(*sizes, op.Mul(height, width), axis=0)
    return op.Gather(op.Reshape(moved, shape), places, axis=-1)


@STABLE.rule(aten.diagonal_scatter.default)
def _diagonal_scatter(x: Any, source: Any, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Any:
    """The places on the diagonal are the diagonal of all places."""
    return _scattered(x, _diagonal(_places(x), offset, dim1, dim2), source)


@STABLE.rule(aten.put.default)
def _put(x: Any, places: Any, source: Any, accumulate: bool = False) -> Any:
    return _scattered(x, places, source, "add" if accumulate else "none")


def _places(x: Any) -> Any:
    """The place of each element among all, in the shape of `x`."""
    zero, one = op.Constant(value_int=0), op.Constant(value_int=1)
    shape = op.Shape(x)
    found = op.Reshape(op.Range(zero, op.Size(x), one), shape, allowzero=1)
    found.shape = x.shape
    return found


def _scattered(x: Any, places: Any, source: Any, reduction: str = "none") -> Any:
    flat = (op.Reshape(each, ints(-1)) for each in (x, places, source))
    found = op.ScatterElements(*flat, axis=0, reduction=reduction)
    return op.Reshape(found, op.Shape(x), allowzero=1)


@STABLE.rule(aten.trace.default)
def _trace(x: Any) -> Any:
    return op.ReduceSum(_diagonal(x), keepdims=0)


@STABLE.rule(aten.scatter.src)
def _scatter(x: Any, dim: int, index: Any, source: Any) -> Any:
    return _along(x, dim, index, source)


@STABLE.rule(aten.scatter_add.default)
def _scatter_add(x: Any, dim: int, index: Any, source: Any) -> Any:
    return _along(x, dim, index, source, "add")


@STABLE.rule(aten.scatter.reduce)
def _scatter_update(x: Any, dim: int, index: Any, source: Any, *, reduce: str) -> Any:
    return _scatter_reduce(x, dim, index, source, _UPDATES[reduce])


@STABLE.rule(aten.scatter.value_reduce)
def _scatter_update_by_number(x: Any, dim: int, index: Any, number: Any, *, reduce: str) -> Any:
    source = op.Expand(like(x, number), op.Shape(index))
    source.dtype, source.shape = x.dtype, index.shape
    return _scatter_reduce(x, dim, index, source, _UPDATES[reduce])


@STABLE.rule(aten.index_reduce.default)
def _index_reduce(
    x: Any, dim: int, index: Any, source: Any, reduce: str, *, include_self: bool = True
) -> Any:
    """A scatter of whole rows."""
    rank = len(x.shape)
    if rank:
        sizes = ints(*(-1 if axis == dim % rank else 1 for axis in range(rank)))
        rows = op.Expand(op.Reshape(index, sizes), op.Shape(source))
    else:
        rows = op.Reshape(index, op.Constant(value_ints=[]))
    rows.dtype, rows.shape = index.dtype, source.shape
    return _scatter_reduce(x, dim, rows, source, reduce, include_self=include_self)


@STABLE.rule(aten.scatter_reduce.two)
def _scatter_reduce(
    x: Any, dim: int, index: Any, source: Any, reduce: str, *, include_self: bool = True
) -> Any:
    if x.dtype == BOOL:
        wide = (cast(each, INT32) for each in (x, source))
        found: Any = _scatter_reduce(
            next(wide), dim, index, next(wide), reduce, include_self=include_self
        )
        return op.Cast(found, to=int(BOOL))
    if reduce == "mean":
        return _scatter_mean(x, dim, index, source, include_self)
    start = x if include_self else _along(x, dim, index, _neutral(reduce, source))
    return _along(start, dim, index, source, _REDUCTIONS[reduce])


def _scatter_mean(x: Any, dim: int, index: Any, source: Any, include_self: bool) -> Any:
    """The sum by how many there are; of integers, rounded down."""
    ones, zeros, every = _full(source, 1), _full(source, 0), _full(x, 1)
    start, first = x, every
    if not include_self:
        start, first = (_along(each, dim, index, zeros) for each in (x, every))
    total = _along(start, dim, index, source, "add")
    count = _along(first, dim, index, ones, "add")
    quotient = op.Div(total, count)
    if x.dtype in REALS:
        return quotient
    exact = op.Equal(op.Mul(quotient, count), total)
    down = op.And(op.Less(total, like(x, 0)), op.Not(exact))
    return op.Sub(quotient, op.CastLike(down, x))


def _neutral(reduce: str, source: Any) -> Any:
    """What changes no result, in the shape of the source."""
    if reduce in ("sum", "prod"):
        number: float = 0 if reduce == "sum" else 1
    elif source.dtype in REALS:
        number = math.inf if reduce == "amin" else -math.inf
    else:
        limits = np.iinfo(source.dtype.numpy())
        number = int(limits.max if reduce == "amin" else limits.min)
    return _full(source, number)


def _full(x: Any, number: float) -> Any:
    """One number in the dtype and shape of another value."""
    found = op.Expand(like(x, number), op.Shape(x))
    found.dtype, found.shape = x.dtype, x.shape
    return found


def _along(x: Any, dim: int, index: Any, source: Any, reduction: str = "none") -> Any:
    """ScatterElements of what the source has for each place of the index."""
    if not x.shape:
        one = (op.Reshape(each, ints(1)) for each in (x, index, source))
        found = op.Squeeze(op.ScatterElements(*one, axis=0, reduction=reduction), ints(0))
    else:
        if not _are_equal(index.shape, source.shape):
            dims = range(len(x.shape))
            starts, axes = ints(*(0 for _ in dims)), ints(*dims)
            source = op.Slice(source, starts, op.Shape(index), axes)
        found = op.ScatterElements(x, index, source, axis=dim, reduction=reduction)
    found.dtype, found.shape = x.dtype, x.shape
    return found


def _are_equal(one: ir.Shape | None, other: ir.Shape | None) -> bool:
    return one is not None and other is not None and list(one) == list(other)
