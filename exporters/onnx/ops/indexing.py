"""Operators of `aten` that take elements from places of a tensor, or put them there.

torch.onnx says a diagonal as a product with a mask, which makes NaN of infinity, and the mean that
`scatter_reduce` computes as the last value alone; a source that has more than the places it
leaves to ONNX Runtime, which refuses it.
"""

import math
from collections.abc import Sequence
from itertools import permutations
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from onnxscript import opset23 as op
from torch import Tensor
from torch.fx import Node

from enginecast.exporters.onnx.ops.graph import size_of
from enginecast.exporters.onnx.ops.registry import form, refuse, rewrite, torch_form
from enginecast.exporters.onnx.ops.values import BOOL, INT32, REALS, cast, ints, like
from enginecast.passes.ir.base import ProgramView
from enginecast.passes.ir.edit import (
    arguments,
    dtype_of,
    first_input,
    insert,
    same_shape,
    same_size,
    shape_of,
    value,
)
from enginecast.passes.ir.effects import aten
from enginecast.passes.ir.match import is_call
from enginecast.passes.ir.varying_sizes import may_be_zero

_REDUCTIONS = {"sum": "add", "prod": "mul", "amin": "min", "amax": "max"}


@form(aten.diagonal.default, aten.diagonal_copy.default)
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


refuse(aten.diagonal_scatter.default, reason="write with a mask, torch.where(eye, ...)")


@form(aten.put.default)
def _put(x: Any, places: Any, source: Any, accumulate: bool = False) -> Any:
    """What a write through a view of a view becomes."""
    flat = (op.Reshape(each, ints(-1)) for each in (x, places, source))
    written = op.ScatterElements(*flat, axis=0, reduction="add" if accumulate else "none")
    return op.Reshape(written, op.Shape(x), allowzero=1)


@form(aten.scatter.src)
def _scatter(x: Any, dim: int, index: Any, source: Any) -> Any:
    return _along(x, dim, index, source)


@form(aten.scatter_add.default)
def _scatter_add(x: Any, dim: int, index: Any, source: Any) -> Any:
    return _along(x, dim, index, source, "add")


@form(aten.scatter_reduce.two)
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


def _has_int32(node: Node) -> bool:
    """Whether elements are found by int32, of which ONNX takes no indices."""
    indices: Any = node.args[1]
    return any(index is not None and dtype_of(index) is torch.int32 for index in indices)


@rewrite(aten.index.Tensor, aten.index_put.default, when=_has_int32)
def _int64_indices(program: ProgramView, node: Node) -> None:
    found: Any = node.args[1]
    wide = [
        insert(program.graph, aten.to.dtype, (index, torch.int64), like=node)
        if index is not None and dtype_of(index) is torch.int32
        else index
        for index in found
    ]
    node.update_arg(1, wide)


@rewrite(aten.masked_select.default)
def _select_by_index(program: ProgramView, node: Node) -> None:
    """masked_select has no ONNX form, and a mask as an index has; the new size keeps its name."""
    source, mask = arguments(node)[:2]
    if not same_shape(shape_of(source), shape_of(mask)):
        source, mask = _broadcast(program, (source, mask), node)
    node.target, node.args = aten.index.Tensor, (source, [mask])


def _broadcast(program: ProgramView, sources: Sequence[Node], like: Node) -> list[Node]:
    """Values in one shape, by expanding them."""
    rank = max(len(shape_of(source)) for source in sources)
    sizes: list[Node | int] = [1] * rank
    for source in sources:
        for dim, size in enumerate(shape_of(source), rank - len(shape_of(source))):
            if not same_size(size, 1):
                sizes[dim] = size_of(program, source, dim - rank, like)
    return [
        insert(program.graph, aten.expand.default, (source, sizes), like=like) for source in sources
    ]


def _repeats_by_size_or_nothing(node: Node) -> bool:
    sizes = shape_of(first_input(node))
    return isinstance(node.args[1], Node) or any(map(may_be_zero, sizes))


@torch_form(aten.repeat_interleave.self_int, when=_repeats_by_size_or_nothing)
def _repeated(
    x: Tensor, repeats: Any, dim: int | None = None, *, output_size: Any = None
) -> Tensor:
    """Rows so often as a size says: torch.onnx expands the dimension before the one it added.
    Where there may be none, their number is not -1.
    """
    x, axis = (x.reshape(-1), 0) if dim is None else (x, dim % x.dim())
    before, after = x.shape[:axis], x.shape[axis + 1 :]
    column = x.unsqueeze(axis + 1).expand(*before, x.shape[axis], repeats, *after)
    count = x.shape[axis] * repeats if output_size is None else output_size
    return column.reshape([*before, count, *after])


@rewrite(aten.repeat_interleave.self_Tensor, when=lambda node: "output_size" in node.kwargs)
def _uncounted(program: ProgramView, node: Node) -> Node:
    """Rows so often as a tensor says: torch.onnx does not take their number, which is the sum."""
    kwargs = {name: value for name, value in node.kwargs.items() if name != "output_size"}
    op = aten.repeat_interleave.self_Tensor
    return insert(program.graph, op, node.args, kwargs, like=node, replaces=True)


def _is_cropped(node: Node) -> bool:
    """Whether a part of a tensor is reshaped whose size varies, as a table of positions is cropped
    to an image, or one that is repeated so: torch.onnx takes it for a view, which it is not.
    """
    source = first_input(node)
    is_spread = is_call(source, aten.slice.Tensor, aten.expand.default)
    is_part = is_spread and not source.meta["val"].is_contiguous()
    return is_part and any(isinstance(size, torch.SymInt) for size in shape_of(source))


@rewrite(aten.reshape.default, when=_is_cropped)
def _as_copy(program: ProgramView, node: Node) -> None:
    kept = {"memory_format": torch.contiguous_format}
    copied = insert(program.graph, aten.clone.default, (first_input(node),), kept, like=node)
    node.update_arg(0, copied)


MOST_ORDERED = 6
"""Dimensions of a value whose order in memory is looked for."""


def _memory_order(x: Tensor) -> tuple[int, ...] | None:
    """The order of dimensions in which a value fills its memory; None where it leaves gaps."""
    for order in permutations(range(x.dim())) if x.dim() <= MOST_ORDERED else ():
        step: Any = 1
        for dim in reversed(order):
            if not (same_size(x.stride()[dim], step) or same_size(x.shape[dim], 1)):
                break
            step = step * x.shape[dim]
        else:
            return order
    return None


def _lies_otherwise(node: Node) -> bool:
    """Whether memory is read whose order is not that of the dimensions."""
    x = value(first_input(node))
    is_whole = len(node.args) < 4 or node.args[3] is None or same_size(x.storage_offset(), 0)
    order = _memory_order(x)
    return is_whole and order is not None and order != tuple(range(x.dim()))


@rewrite(aten.as_strided.default, when=_lies_otherwise)
def _in_memory_order(program: ProgramView, node: Node) -> None:
    """ONNX has no memory: torch.onnx counts the strides in the order of the dimensions."""
    source = first_input(node)
    order = _memory_order(value(source))
    node.update_arg(0, insert(program.graph, aten.permute.default, (source, order), like=node))
