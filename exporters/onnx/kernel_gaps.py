"""Compute in fp32 what ONNX's own ops do not take in bf16 (TopK, Einsum, OneHot, Compress, ...),
and what ONNX Runtime has no fp16 kernel for: a scatter that adds or multiplies.  Products of narrow
integers are computed in int32, whose last bits are theirs; the largest of int32 in fp64, which
holds each of them.

y: bf16 = Einsum(a, b)        a': f32 = Cast(a);  b': f32 = Cast(b)
                              y': f32 = Einsum(a', b')
                              y: bf16 = Cast(y')
"""

from collections.abc import Mapping, Sequence
from functools import cache

import onnx
import onnx_ir as ir

_BF16 = "tensor(bfloat16)"
_NARROW = (ir.DataType.INT8, ir.DataType.UINT8, ir.DataType.INT16)
_WIDER: Mapping[str, Sequence[tuple[ir.DataType, ir.DataType]]] = {
    "MatMul": [(narrow, ir.DataType.INT32) for narrow in _NARROW],
    "Neg": [(ir.DataType.UINT8, ir.DataType.INT32)],
    "MaxPool": [(ir.DataType.INT32, ir.DataType.DOUBLE)],
}
"""Op -> integers that ONNX Runtime has no kernel for, and what holds the same result."""


def fill_kernel_gaps(model: ir.Model) -> None:
    """Cast around every node that does not take what it reads or gives, in place."""
    opset = model.opset_imports[""]
    for node in list(model.graph.all_nodes()):
        if node.domain:
            continue
        if _reduces(node):
            _compute_in(node, ir.DataType.FLOAT16, ir.DataType.FLOAT)
        if _reduces(node) or _lacks_bf16(node.op_type, opset):
            _compute_in(node, ir.DataType.BFLOAT16, ir.DataType.FLOAT)
        for narrow, wide in _WIDER.get(node.op_type, ()):
            _compute_in(node, narrow, wide)


def _reduces(node: ir.Node) -> bool:
    """Whether a scatter computes with what it finds in a place."""
    attribute = node.attributes.get("reduction")
    reduces = attribute is not None and attribute.as_string() != "none"
    return reduces and node.op_type.startswith("Scatter")


@cache
def _lacks_bf16(op: str, opset: int) -> bool:
    """Whether an op takes fp16 and not bf16."""
    inputs = onnx.defs.get_schema(op, opset).inputs
    taken = [set(one.types) for one in inputs]
    return any("tensor(float16)" in types and _BF16 not in types for types in taken)


def _compute_in(node: ir.Node, low: ir.DataType, wide: ir.DataType) -> None:
    for index, source in enumerate(node.inputs):
        if source is not None and source.dtype == low:
            cast = _cast(node, wide)
            cast.replace_input_with(0, source)
            node.prepend(cast)
            node.replace_input_with(index, cast.outputs[0])
            cast.outputs[0].shape = source.shape
    for found in node.outputs:
        if found.dtype == low:
            cast = _cast(node, low)
            cast.outputs[0].shape = found.shape
            found.replace_all_uses_with(cast.outputs[0], replace_graph_outputs=True)
            cast.replace_input_with(0, found)
            found.dtype = wide
            node.append(cast)


def _cast(node: ir.Node, dtype: ir.DataType) -> ir.Node:
    cast = ir.node("Cast", [None], {"to": int(dtype)}, metadata_props=dict(node.metadata_props))
    cast.outputs[0].dtype = dtype
    return cast
