"""Pools.  Adaptive ones whose windows differ in size are refused (microsoft/onnxscript#1616)."""

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
from enginecast.exporters.onnx.ops.registry import form, refuse, torch_form
from enginecast.exporters.onnx.ops.values import DOUBLE, INT64, REALS, like, scalar
from enginecast.passes.ir.edit import dtype_of, first_input, shape_of
from enginecast.passes.ir.effects import aten

# Averages

refuse(
    *(aten.avg_pool2d.default, aten.avg_pool3d.default),
    when=lambda node: len(node.args) > 6 and node.args[6] is not None,
    reason="ONNX's pools have no divisor of one's own",  # torch.onnx leaves it out
)

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
    aten._adaptive_avg_pool3d.default: (3, aten.avg_pool3d),
    aten.adaptive_avg_pool3d.default: (3, aten.avg_pool3d),
    aten.adaptive_max_pool1d.default: (1, aten.max_pool1d_with_indices),
    aten.adaptive_max_pool2d.default: (2, aten.max_pool2d_with_indices),
    aten.adaptive_max_pool3d.default: (3, aten.max_pool3d_with_indices),
}
"""Adaptive pools -> over how many dimensions, and the pool that they are where all windows are
alike."""


def _remainders(node: Node) -> list[int]:
    """What the windows along each dimension leave over; empty where sizes vary."""
    target: Any = node.target
    sizes = shape_of(first_input(node))[-_ADAPTIVE[target][0] :]
    counts: Any = node.args[1]
    known = all(isinstance(size, int) for size in (*sizes, *counts))
    return list(map(operator.mod, sizes, counts)) if known else []


def _even_windows(pool: Any, x: Tensor, counts: Sequence[int]) -> Any:
    sizes = x.shape[-len(counts) :]
    windows = [size // count for size, count in zip(sizes, counts, strict=True)]
    return pool(x, windows, windows)


for _op, (_, _pool) in _ADAPTIVE.items():
    torch_form(_op, when=lambda node: set(_remainders(node)) == {0})(partial(_even_windows, _pool))
refuse(*_ADAPTIVE, when=lambda node: any(_remainders(node)), reason="its windows differ in size")
