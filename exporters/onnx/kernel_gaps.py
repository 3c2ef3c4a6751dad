"""What kernels lack: newer versions of ops, and dtypes.

A model that pools regions says an older opset, where all of it means the same there: ONNX Runtime
(1.31) has no kernels of RoiAlign and MaxRoiPool beyond opset 21.

Compute in fp32 what ONNX's own ops do not take in bf16 (TopK, Einsum, OneHot, Compress, ...),
and what ONNX Runtime has no fp16 kernel for: a scatter that adds or multiplies.  Products of narrow
integers, and all else that ONNX takes of int32 alone, are computed in int32, whose last bits are
theirs; the largest of int32 in fp64, which holds each of them.  Integers of which ONNX has an op
in no other dtype, either, are refused.

y: bf16 = Einsum(a, b)        a': f32 = Cast(a);  b': f32 = Cast(b)
                              y': f32 = Einsum(a', b')
                              y: bf16 = Cast(y')
"""

from collections.abc import Mapping, Sequence
from functools import cache

import onnx
import onnx_ir as ir

from enginecast.errors import LoweringError
from enginecast.exporters.onnx.metadata import MODULE

_BF16 = "tensor(bfloat16)"
_NARROW = (ir.DataType.INT8, ir.DataType.UINT8, ir.DataType.INT16)
_INTEGERS = (*_NARROW, ir.DataType.INT32, ir.DataType.INT64, ir.DataType.BOOL)
_WIDER: Mapping[str, Sequence[tuple[ir.DataType, ir.DataType]]] = {
    "MatMul": [(narrow, ir.DataType.INT32) for narrow in _NARROW],
    "Trilu": [(narrow, ir.DataType.INT32) for narrow in _NARROW],
    "Neg": [(ir.DataType.UINT8, ir.DataType.INT32)],
    "MaxPool": [(ir.DataType.INT32, ir.DataType.DOUBLE)],
    "Unique": [
        (narrow, ir.DataType.INT64) for narrow in (*_NARROW, ir.DataType.INT32, ir.DataType.BOOL)
    ],
}
"""Op -> integers that ONNX Runtime has no kernel for, and what holds the same result."""
_COMPARISONS = frozenset({"Greater", "GreaterOrEqual", "Less", "LessOrEqual"})
_NEWEST = {"RoiAlign": 21, "MaxRoiPool": 21}
"""The opset beyond which ONNX Runtime (1.31) has no kernel of an op."""


def say_older_opset(model: ir.Model) -> None:
    """Set the opset to one in which every op has a kernel, in place.

    Raises:
        LoweringError: another op of the model is not the same there; names both.
    """
    nodes = [node for node in model.graph.all_nodes() if not node.domain]
    old = [node.op_type for node in nodes if node.op_type in _NEWEST]
    if not old:
        return
    opset, now = min(_NEWEST[op] for op in old), model.opset_imports[""]
    for node in nodes:
        if not _is_same(node.op_type, opset, now, frozenset(node.attributes)):
            raise LoweringError(
                f"ONNX Runtime has {old[0]} up to opset {opset} of ONNX, and {node.op_type} of this"
                f" program needs opset {now}"
            )
    model.opset_imports[""] = opset


@cache
def _is_same(op: str, opset: int, now: int, given: frozenset[str]) -> bool:
    """Whether an op with these attributes means the same in an older opset: newer versions of it
    only take more dtypes.
    """
    try:
        older, newer = (onnx.defs.get_schema(op, version) for version in (opset, now))
    except onnx.defs.SchemaError:  # it is younger
        return False
    known = {name: str(found.default_value) for name, found in older.attributes.items()}
    defaults = {name: str(newer.attributes[name].default_value) for name in known}
    sizes = [(len(schema.inputs), len(schema.outputs)) for schema in (older, newer)]
    return given <= known.keys() and known == defaults and sizes[0] == sizes[1]


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
        for dtype in _INTEGERS:
            if any(found is not None and found.dtype == dtype for found in node.inputs):
                _fill_gap_of(node, dtype, opset)


def _fill_gap_of(node: ir.Node, dtype: ir.DataType, opset: int) -> None:
    """Compute in int32 what ONNX has not of a narrower dtype; refuse what it has of neither."""
    taken = _taken(node.op_type, opset)
    for index, source in enumerate(node.inputs):
        types = taken[min(index, len(taken) - 1)]
        if source is None or source.dtype != dtype or _name(dtype) in types:
            continue
        if dtype == ir.DataType.BOOL and node.op_type in _COMPARISONS:
            return _compare_in_int32(node)
        if dtype not in _NARROW or _name(ir.DataType.INT32) not in types:
            place = node.metadata_props.get(MODULE, "")
            raise LoweringError(
                f"ONNX has no {node.op_type} of {dtype.name.lower()} (module '{place}')",
                hint="Compute it in floats.",
            )
        return _compute_in(node, dtype, ir.DataType.INT32)


def _compare_in_int32(node: ir.Node) -> None:
    """False comes before True."""
    for index, source in enumerate(node.inputs):
        cast = _cast(node, ir.DataType.INT32)
        cast.replace_input_with(0, source)
        node.prepend(cast)
        node.replace_input_with(index, cast.outputs[0])


@cache
def _taken(op: str, opset: int) -> Sequence[frozenset[str]]:
    """The types that an op takes, for each of its inputs."""
    return [frozenset(one.types) for one in onnx.defs.get_schema(op, opset).inputs]


def _name(dtype: ir.DataType) -> str:
    return f"tensor({dtype.name.lower()})"


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
    is_changed = False
    for index, source in enumerate(node.inputs):
        if source is not None and source.dtype == low:
            is_changed = True
            cast = _cast(node, wide)
            cast.replace_input_with(0, source)
            node.prepend(cast)
            node.replace_input_with(index, cast.outputs[0])
            cast.outputs[0].shape = source.shape
    for place, found in enumerate(node.outputs):
        is_like = is_changed and found.dtype is None and place in _like_inputs(node)
        if found.dtype == low or is_like:
            cast = _cast(node, low)
            cast.outputs[0].shape = found.shape
            found.replace_all_uses_with(cast.outputs[0], replace_graph_outputs=True)
            cast.replace_input_with(0, found)
            found.dtype = wide
            node.append(cast)


def _like_inputs(node: ir.Node) -> list[int]:
    """Which results have the dtype of the first input, as ONNX says."""
    schema = onnx.defs.get_schema(node.op_type)
    first = schema.inputs[0].type_str
    return [place for place, one in enumerate(schema.outputs) if one.type_str == first]


def _cast(node: ir.Node, dtype: ir.DataType) -> ir.Node:
    cast = ir.node("Cast", [None], {"to": int(dtype)}, metadata_props=dict(node.metadata_props))
    cast.outputs[0].dtype = dtype
    return cast
