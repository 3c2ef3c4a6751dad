"""Reductions over nothing: what ONNX Runtime makes of a dimension of size 0, and torch does not.

Where an axis is counted from the end, ONNX Runtime (1.31) keeps it in the result, with size 0; the
mean of nothing is 0, and its largest element the smallest of its dtype.
"""

import math
import re
from collections.abc import Sequence
from typing import Any

import onnx_ir as ir
from onnxscript import opset23 as op
from onnxscript.function_libs.torch_lib.ops import core

from enginecast.exporters.onnx.ordered import BOOL, INT64, ints
from enginecast.exporters.onnx.stable import STABLE, cast, like
from enginecast.passes.ir.effects import aten


@STABLE.rule(aten.any.default)
def _any(x: Any) -> Any:
    return _any_of(x, None, keepdim=False)


@STABLE.rule(aten.any.dim, aten.any.dims)
def _any_along(x: Any, dim: int | Sequence[int] | None = None, keepdim: bool = False) -> Any:
    return _any_of(x, dim, keepdim=keepdim)


def _any_of(x: Any, dim: int | Sequence[int] | None, *, keepdim: bool) -> Any:
    """Whether there is one, by counting; the largest of no numbers would be true."""
    found = x if x.dtype == BOOL else op.Not(op.Equal(x, like(x, 0)))
    if not x.shape:
        return op.Identity(found)
    counted = op.Cast(found, to=int(INT64))
    axes = _axes(x, dim)
    total = op.ReduceSum(counted, ints(*axes), keepdims=int(keepdim))
    return op.Greater(total, op.Constant(value_int=0))


@STABLE.rule(aten.mean.default)
def _mean(x: Any, *, dtype: int | None = None) -> Any:
    return _mean_of(x, None, keepdim=False, dtype=dtype)


@STABLE.rule(aten.mean.dim)
def _mean_along(
    x: Any,
    dim: int | Sequence[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: int | None = None,
) -> Any:
    return _mean_of(x, dim, keepdim=keepdim, dtype=dtype)


def _mean_of(x: Any, dim: Any, *, keepdim: bool, dtype: int | None) -> Any:
    x = x if dtype in (None, -1) else cast(x, ir.DataType(dtype))
    if not x.shape:
        return op.Identity(x)
    given = [dim] if isinstance(dim, int) else dim or _axes(x, dim)
    # Not a sum divided by a count: in fp16 the sum leaves its range.
    return _nan_of_nothing(x, dim, op.ReduceMean(x, ints(*given), keepdims=int(keepdim)))


@STABLE.rule(aten.var.correction)
def _var(x: Any, dim: Any = None, *, correction: float | None = None, keepdim: bool = False) -> Any:
    return _nan_of_nothing(x, dim, core.aten_var_correction(x, dim, correction, keepdim))


@STABLE.rule(aten.std.correction)
def _std(x: Any, dim: Any = None, *, correction: float | None = None, keepdim: bool = False) -> Any:
    return _nan_of_nothing(x, dim, core.aten_std_correction(x, dim, correction, keepdim))


def _nan_of_nothing(x: Any, dim: Any, found: Any) -> Any:
    axes = _axes(x, dim)
    if not any(_may_be_nothing(x.shape[axis]) for axis in axes):
        return found
    count = op.ReduceProd(op.Gather(op.Shape(x), ints(*axes)), keepdims=0)
    is_nothing = op.Equal(count, op.Constant(value_int=0))
    return op.Where(is_nothing, like(x, math.nan), found)


def _may_be_nothing(size: Any) -> bool:
    """Not the size of an input, which is one at least."""
    return size == 0 if isinstance(size, int) else not re.fullmatch(r"s\d+", str(size.value))


def _axes(x: Any, dim: int | Sequence[int] | None) -> list[int]:
    rank = len(x.shape)
    dims = [dim] if isinstance(dim, int) else dim or range(rank)
    return sorted({axis % rank for axis in dims})


def count_axes_from_the_start(model: ir.Model) -> None:
    """Give reductions of what may be nothing axes of which none is negative, in place."""
    for node in list(model.graph.all_nodes()):
        if not node.domain and node.op_type in ("ArgMax", "ArgMin"):
            _count_from_the_start(node)
        if node.domain or not node.op_type.startswith("Reduce") or len(node.inputs) < 2:
            continue
        x, axes = node.inputs[:2]
        known = axes.const_value if axes is not None else None
        if x is None or x.shape is None or known is None or (known.numpy() >= 0).all():
            continue
        if not any(map(_may_be_nothing, x.shape)):
            continue
        values = known.numpy() % len(x.shape)
        constant = ir.node("Constant", [], {"value": ir.tensor(values)})
        constant.outputs[0].dtype, constant.outputs[0].shape = INT64, ir.Shape(values.shape)
        node.prepend(constant)
        node.replace_input_with(1, constant.outputs[0])


def _count_from_the_start(node: ir.Node) -> None:
    [x], axis = node.inputs, node.attributes.get_int("axis", 0)
    if axis < 0 and x is not None and x.shape is not None and any(map(_may_be_nothing, x.shape)):
        node.attributes["axis"] = ir.AttrInt64("axis", axis % len(x.shape))


def keep_transposes_of_nothing(model: ir.Model) -> None:
    """Keep ONNX Runtime from moving transposes of what may be nothing into products, in place.

    Its optimizer (MatmulTransposeFusion, extended level, seen in 1.31) makes a FusedMatMul of a
    MatMul that reads a Transpose of the batch, [rows, heads, size] -> [heads, rows, size], and that
    divides by the number of rows: with none, the process ends.  A Reshape to the sizes that there
    are copies nothing, and is in its way.
    """
    for node in list(model.graph.all_nodes()):
        if node.op_type != "Transpose":
            continue
        [source], [moved], perm = node.inputs, node.outputs, node.attributes.get_ints("perm", ())
        if source is None or source.shape is None or len(perm) < 3 or perm[0] == 0:
            continue
        if not _may_be_nothing(source.shape[0]) or not _is_multiplied(moved):
            continue
        sizes = ir.node("Shape", [moved], metadata_props=dict(node.metadata_props))
        kept = ir.node("Reshape", [moved, sizes.outputs[0]], {"allowzero": 1})
        kept.metadata_props.update(node.metadata_props)
        kept.outputs[0].dtype, kept.outputs[0].shape = moved.dtype, moved.shape
        sizes.outputs[0].dtype, sizes.outputs[0].shape = INT64, ir.Shape([len(perm)])
        for use in list(moved.uses()):
            use.node.replace_input_with(use.idx, kept.outputs[0])
        kept.replace_input_with(0, moved)
        sizes.replace_input_with(0, moved)
        node.append([sizes, kept])


def _is_multiplied(value: ir.Value) -> bool:
    """Whether a product reads a value, or what a cast or another transpose makes of it."""
    return any(
        use.node.op_type == "MatMul"
        or (use.node.op_type in ("Cast", "Transpose") and _is_multiplied(use.node.outputs[0]))
        for use in value.uses()
    )
