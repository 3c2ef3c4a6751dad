"""What of quantised values TensorRT's form of ONNX lacks, and how it is said instead.

The form: QuantizeLinear and DequantizeLinear around a MatMul, fp8 as e4m3fn, one static scale for
what is read and one for each row of a weight, each in the dtype of the value and above zero.
Source: NVIDIA's guide "Working with Quantized Types" (TensorRT 10.11 and 11.0); onnx/onnx-tensorrt,
QuantDequantLinearHelper (scales above zero; no UINT8) and docs/operators.md (FP8 comes of
quantisation alone: neither Cast nor Gather takes it).
"""

import torch
from torch.fx import Node

import enginecast.exporters.quantized_forms  # noqa: F401 - registers the ops
from enginecast.errors import LoweringError
from enginecast.exporters.quantized_rewriting import Rewriting
from enginecast.passes.graph_edit import dtype_of, shape_of
from enginecast.passes.source import module_path, source_line

ours = torch.ops.enginecast


def refuse_unfit(node: Node, weights: set[Node]) -> None:
    """Refuse an op of quantised values that has no such form.

    Args:
        node: one of our ops, not of weights alone.
        weights: nodes that are known when the engine is built.

    Raises:
        LoweringError: integers, another fp8, scales computed from values, or one for each row of
            what is read.
    """
    dtypes = {_quantised_dtype(found) for found in (node, *node.all_input_nodes)} - {None}
    if dtypes - {torch.float8_e4m3fn}:
        (other, *_) = sorted(map(str, dtypes - {torch.float8_e4m3fn}))
        raise _refusal(node, f"it is quantised to {other.removeprefix('torch.')}, expected fp8")
    if node.target is ours.dynamic_scale.default:
        raise _refusal(node, "its scale is computed from each value, expected a static one")
    if node.target is ours.quantize.default:
        scale = node.args[1]
        assert isinstance(scale, Node)
        if scale not in weights or any(size != 1 for size in shape_of(scale)):
            raise _refusal(node, "it has a scale for each row, expected one for all")


def _refusal(node: Node, what: str) -> LoweringError:
    place = f"{node.target} (module '{module_path(node)}', {source_line(node) or 'no source line'})"
    return LoweringError(
        f"TensorRT's form of ONNX has no {place}: {what}",
        hint="Plan for it: --precision fp8 --target tensorrt, or"
        " plan-fp8{target=tensorrt arch=sm90}.",
    )


def _quantised_dtype(node: Node) -> torch.dtype | None:
    """The dtype of values of 8 bits; None of others."""
    dtype = dtype_of(node)
    return None if dtype is None or dtype.itemsize > 1 or dtype == torch.bool else dtype


def table_of(rewriting: Rewriting, node: Node, dtype: torch.dtype) -> Node | None:
    """Rows of an fp8 table: the table is dequantised whole, and then picked from.

    Args:
        node: enginecast.dequantize of rows and, where there are several, of their scales.
        dtype: of the result.

    Returns:
        What stands for it; None where the rows come from no table.
    """
    rows, scale = node.args[:2]
    assert isinstance(rows, Node)
    assert isinstance(scale, Node)
    embedding = torch.ops.aten.embedding.default
    if rows.target is not embedding:
        return None
    table, ids = rows.args[:2]
    per_row = scale.args[0] if scale.target is embedding else scale
    assert isinstance(table, Node)
    assert isinstance(per_row, Node)
    key = (table_of, table, per_row, dtype)
    if key not in rewriting.made:
        rewriting.made[key] = _whole(rewriting, node, table, per_row, dtype)
    wide = rewriting.made[key]
    return rewriting.add(embedding, wide, ids, *rows.args[2:], like=node)


def _whole(rewriting: Rewriting, node: Node, table: Node, scale: Node, dtype: torch.dtype) -> Node:
    sizes = [] if all(size == 1 for size in shape_of(scale)) else [-1]
    flat = rewriting.add(torch.ops.aten.reshape.default, scale, sizes, like=node)
    held = rewriting.scale(flat, dtype, node)
    return rewriting.add(ours.dequantize_axis.default, table, held, 0, dtype, like=node)
