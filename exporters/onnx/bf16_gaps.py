"""Compute in fp32 what ONNX's own ops do not take in bf16: TopK, Einsum, OneHot, Compress, ...

y: bf16 = Einsum(a, b)        a': f32 = Cast(a);  b': f32 = Cast(b)
                              y': f32 = Einsum(a', b')
                              y: bf16 = Cast(y')
"""

from functools import cache

import onnx
import onnx_ir as ir

_BF16 = "tensor(bfloat16)"


def fill_bf16_gaps(model: ir.Model) -> None:
    """Cast around every node whose schema lacks bf16 where it reads or gives it, in place."""
    opset = model.opset_imports[""]
    for node in list(model.graph.all_nodes()):
        if not node.domain and _lacks_bf16(node.op_type, opset):
            _compute_in_fp32(node)


@cache
def _lacks_bf16(op: str, opset: int) -> bool:
    """Whether an op takes fp16 and not bf16."""
    inputs = onnx.defs.get_schema(op, opset).inputs
    taken = [set(one.types) for one in inputs]
    return any("tensor(float16)" in types and _BF16 not in types for types in taken)


def _compute_in_fp32(node: ir.Node) -> None:
    for index, source in enumerate(node.inputs):
        if source is not None and source.dtype == ir.DataType.BFLOAT16:
            cast = _cast(node, ir.DataType.FLOAT)
            cast.replace_input_with(0, source)
            node.prepend(cast)
            node.replace_input_with(index, cast.outputs[0])
            cast.outputs[0].shape = source.shape
    for found in node.outputs:
        if found.dtype == ir.DataType.BFLOAT16:
            cast = _cast(node, ir.DataType.BFLOAT16)
            cast.outputs[0].shape = found.shape
            found.replace_all_uses_with(cast.outputs[0], replace_graph_outputs=True)
            cast.replace_input_with(0, found)
            found.dtype = ir.DataType.FLOAT
            node.append(cast)


def _cast(node: ir.Node, dtype: ir.DataType) -> ir.Node:
    cast = ir.node("Cast", [None], {"to": int(dtype)}, metadata_props=dict(node.metadata_props))
    cast.outputs[0].dtype = dtype
    return cast
