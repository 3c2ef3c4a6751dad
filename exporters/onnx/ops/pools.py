"""Pools.

Those that ONNX has not, adaptive ones whose windows differ in size (microsoft/onnxscript#1616),
gather each window, as long as the longest one: what is too much repeats its last element, which
changes no maximum, and counts nothing in a mean.
"""

import math
import operator
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from onnxscript import opset23 as op
from onnxscript.function_libs.torch_lib.ops import nn as torch_nn
from torch import Tensor
from torch.fx import Node

from enginecast.exporters.onnx.ops.nn import LAYERS
from enginecast.exporters.onnx.ops.registry import form, torch_form
from enginecast.exporters.onnx.ops.values import DOUBLE, INT64, REALS, like, scalar
from enginecast.passes.ir.edit import dtype_of, first_input, shape_of, value
from enginecast.passes.ir.effects import aten

# Averages


@form(aten.avg_pool2d.default)
def _avg_pool2d(x: Any, kernel_size: Sequence[int], *options: Any, **named: Any) -> Any:
    return _avg_pool(torch_nn.aten_avg_pool2d, x, kernel_size, *options, **named)


@form(aten.avg_pool3d.default)
def _avg_pool3d(x: Any, kernel_size: Sequence[int], *options: Any, **named: Any) -> Any:
    return _avg_pool(torch_nn.aten_avg_pool3d, x, kernel_size, *options, **named)


def _avg_pool(
    pool: Any,
    x: Any,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Any:
    """torch.onnx leaves the divisor out (pytorch/pytorch#105349)."""
    padding = [*padding] * (len(kernel_size) // len(padding))
    if divisor_override is None:
        return pool(x, kernel_size, stride, padding, ceil_mode, count_include_pad)
    if ceil_mode:
        raise ValueError("ONNX divides windows that reach beyond the input by their own size")
    found = pool(x, kernel_size, stride, padding, False, True)
    return op.Mul(found, like(x, math.prod(kernel_size) / divisor_override))


# The largest


@form(aten.max_pool1d_with_indices.default)
def _max_pool1d(x: Any, *options: Any) -> tuple[Any, Any]:
    return _max_pool(torch_nn.aten_max_pool1d_with_indices, 1, x, *options)


@form(aten.max_pool2d_with_indices.default)
def _max_pool2d(x: Any, *options: Any) -> tuple[Any, Any]:
    return _max_pool(torch_nn.aten_max_pool2d_with_indices, 2, x, *options)


@form(aten.max_pool3d_with_indices.default)
def _max_pool3d(x: Any, *options: Any) -> tuple[Any, Any]:
    return _max_pool(torch_nn.aten_max_pool3d_with_indices, 3, x, *options)


def _max_pool(pool: Any, rank: int, x: Any, *options: Any) -> tuple[Any, Any]:
    """A window with NaN gives NaN, and the place of the last one, which is the largest such place.

    ONNX Runtime (1.31) passes some of them by.
    """
    found, places = pool(x, *options)
    if x.dtype not in REALS:
        return found, places
    sizes = op.Shape(x, start=-rank)
    zero, one = op.Constant(value_int=0), op.Constant(value_int=1)
    every = op.Reshape(op.Range(zero, op.ReduceProd(sizes, keepdims=0), one), sizes)
    numbers = op.Cast(every, to=int(DOUBLE))
    holes = op.Where(op.IsNaN(x), numbers, scalar(-1.0, DOUBLE))
    holes.dtype, holes.shape = DOUBLE, x.shape
    last, _ = pool(holes, *options)
    is_hole = op.GreaterOrEqual(last, scalar(0.0, DOUBLE))
    largest = op.Where(is_hole, like(x, math.nan), found)
    return largest, op.Where(is_hole, op.Cast(last, to=int(INT64)), places)


def _max_pool_of_holes(pool: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """ONNX Runtime's (1.31) gives the lowest number for a window of -inf, and passes NaN by."""
    largest = pool(x, *args, **kwargs)
    some = pool((x != -math.inf).to(x.dtype), *args, **kwargs)
    holes = pool(x.isnan().to(x.dtype), *args, **kwargs)
    found = torch.where(some > 0, largest, -math.inf)
    return torch.where(holes > 0, math.nan, found)


_LOGARITHMS = frozenset({aten.log.default, aten.log2.default, aten.log10.default})

_QUOTIENTS = frozenset({aten.div.Tensor, aten.reciprocal.default, aten.rsqrt.default})


def _may_hold_infinity(node: Node) -> bool:
    """Whether a max pool may read -inf or NaN: where an infinity, a logarithm or a division stands
    before it, up to the next layer with weights.
    """
    if dtype_of(node) not in (torch.float32, torch.float64):
        return False
    waiting, seen = [node], {node}
    while waiting:
        here = waiting.pop()
        is_divided = here.target in _QUOTIENTS and isinstance(here.args[-1], Node)
        is_infinite = any(a in (math.inf, -math.inf) for a in here.args)
        if is_divided or is_infinite or here.target in _LOGARITHMS:
            return True
        sources = set(here.all_input_nodes) - seen if here.target not in LAYERS else set()
        seen |= sources
        waiting += sources
    return False


for _op in (aten.max_pool1d.default, aten.max_pool2d.default, aten.max_pool3d.default):
    torch_form(_op, when=_may_hold_infinity)(partial(_max_pool_of_holes, _op))


# Adaptive ones


_ADAPTIVE = {
    aten._adaptive_avg_pool3d.default: 3,
    aten.adaptive_avg_pool3d.default: 3,
    aten.adaptive_max_pool1d.default: 1,
    aten.adaptive_max_pool2d.default: 2,
    aten.adaptive_max_pool3d.default: 3,
}
"""Adaptive pools -> over how many dimensions."""


def _is_adaptive(node: Node) -> bool:
    """Whether an adaptive pool is of known sizes, and none that is a pool of ONNX's own."""
    target: Any = node.target
    sizes = shape_of(first_input(node))[-_ADAPTIVE[target] :]
    wanted: Any = node.args[1]
    if not all(isinstance(size, int) for size in (*sizes, *wanted)):
        return False
    if isinstance(value(node), tuple | list):
        return True  # the largest, and where they are, which ONNX gives for no such pool
    return len(sizes) == 3 or any(map(operator.mod, sizes, wanted))


@torch_form(
    *(aten.adaptive_avg_pool3d.default, aten._adaptive_avg_pool3d.default), when=_is_adaptive
)
def _adaptive_mean(x: Tensor, counts: Sequence[int]) -> Tensor:
    """The mean of each window."""
    rank, inside = len(counts), None
    for at, (size, count) in enumerate(zip(x.shape[-rank:], counts, strict=True)):
        own = _among(_is_inside(size, count), at, rank)
        inside = own if inside is None else inside & own
    assert inside is not None
    windows = torch.where(inside, _windows(x, counts), 0.0)
    return windows.flatten(-rank).sum(-1) / inside.flatten(-rank).sum(-1)


@torch_form(
    aten.adaptive_max_pool1d.default,
    *(aten.adaptive_max_pool2d.default, aten.adaptive_max_pool3d.default),
    when=_is_adaptive,
)
def _adaptive_max(x: Tensor, counts: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The largest element of each window, and where it lies among all; of NaN, the last one."""
    rank, sizes = len(counts), x.shape[-len(counts) :]
    windows = _windows(x, counts).flatten(-rank)
    place = windows.argmax(-1, keepdim=True)
    if x.is_floating_point():
        holes = windows.isnan()
        last = windows.shape[-1] - 1 - holes.flip(-1).to(torch.int64).argmax(-1, keepdim=True)
        place = torch.where(holes.any(-1, keepdim=True), last, place)
    flat: Any = 0
    for at, (size, count) in enumerate(zip(sizes, counts, strict=True)):
        along = _among(_elements(size, count), at, rank)
        flat = flat + along * math.prod(sizes[at + 1 :])
    among_all = flat.flatten(-rank).expand(windows.shape)
    results = (windows.gather(-1, place), among_all.gather(-1, place))
    return results[0].squeeze(-1), results[1].squeeze(-1)


def _among(table: Tensor, at: int, rank: int) -> Tensor:
    """A table [windows, elements] of one of `rank` dimensions, as wide as those of all."""
    sizes = [1] * 2 * rank
    sizes[at], sizes[rank + at] = table.shape
    return table.reshape(sizes)


def _windows(x: Tensor, counts: Sequence[int]) -> Tensor:
    """[..., windows of each dimension, elements of each dimension]."""
    before = x.dim() - len(counts)
    for dim, count in reversed(list(enumerate(counts, before))):
        places = _elements(x.shape[dim], count)
        x = x.index_select(dim, places.flatten()).unflatten(dim, places.shape)
    order = [*range(before), *range(before, x.dim(), 2), *range(before + 1, x.dim(), 2)]
    return x.permute(order)


def _starts(size: int, count: int) -> Tensor:
    return torch.arange(count) * size // count


def _ends(size: int, count: int) -> Tensor:
    return ((torch.arange(count) + 1) * size + count - 1) // count


def _longest(size: int, count: int) -> int:
    starts = (at * size // count for at in range(count))
    ends = (-(-(at + 1) * size // count) for at in range(count))
    return max(end - start for start, end in zip(starts, ends, strict=True))


def _elements(size: int, count: int) -> Tensor:
    """The elements of each window [windows, elements]; those of shorter ones end in the last."""
    along = _starts(size, count)[:, None] + torch.arange(_longest(size, count))
    return torch.minimum(along, _ends(size, count)[:, None] - 1)


def _is_inside(size: int, count: int) -> Tensor:
    """Which elements of each window are its own [windows, elements]."""
    along = _starts(size, count)[:, None] + torch.arange(_longest(size, count))
    return along < _ends(size, count)[:, None]
