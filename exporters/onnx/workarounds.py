"""What ONNX Runtime lacks or gets wrong in a graph, and is said otherwise there; seen in 1.31.

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

import numpy as np
import onnx
import onnx_ir as ir

from enginecast.errors import LoweringError
from enginecast.exporters.onnx.metadata import MODULE
from enginecast.exporters.onnx.ops.reductions import may_be_nothing


def work_around(model: ir.Model) -> None:
    """All of it, in place; the same computation.

    Raises:
        LoweringError: ONNX has an op of no such integers, or in no opset that ONNX Runtime has.
    """
    count_axes_from_the_start(model)
    keep_transposes_of_nothing(model)
    say_older_opset(model)
    fill_kernel_gaps(model)
    keep_pads_of_max_pools(model)


# Rows that values choose, of which there may be none


def count_axes_from_the_start(model: ir.Model) -> None:
    """Give reductions of what may be nothing axes of which none is negative, in place: where an
    axis is counted from the end, ONNX Runtime (1.31) keeps it in the result, with size 0.
    """
    for node in list(model.graph.all_nodes()):
        if not node.domain and node.op_type in ("ArgMax", "ArgMin"):
            _count_from_the_start(node)
        if node.domain or not node.op_type.startswith("Reduce") or len(node.inputs) < 2:
            continue
        x, axes = node.inputs[:2]
        known = axes.const_value if axes is not None else None
        if x is None or x.shape is None or known is None or (known.numpy() >= 0).all():
            continue
        if not any(map(may_be_nothing, x.shape)):
            continue
        values = known.numpy() % len(x.shape)
        constant = ir.node("Constant", [], {"value": ir.tensor(values)})
        constant.outputs[0].dtype, constant.outputs[0].shape = (
            ir.DataType.INT64,
            ir.Shape(values.shape),
        )
        node.prepend(constant)
        node.replace_input_with(1, constant.outputs[0])


def _count_from_the_start(node: ir.Node) -> None:
    [x], axis = node.inputs, node.attributes.get_int("axis", 0)
    if axis < 0 and x is not None and x.shape is not None and any(map(may_be_nothing, x.shape)):
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
        if not may_be_nothing(source.shape[0]) or not _is_multiplied(moved):
            continue
        sizes = ir.node("Shape", [moved], metadata_props=dict(node.metadata_props))
        kept = ir.node("Reshape", [moved, sizes.outputs[0]], {"allowzero": 1})
        kept.metadata_props.update(node.metadata_props)
        kept.outputs[0].dtype, kept.outputs[0].shape = moved.dtype, moved.shape
        sizes.outputs[0].dtype, sizes.outputs[0].shape = ir.DataType.INT64, ir.Shape([len(perm)])
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


# Opsets

_NEWEST = {"RoiAlign": 21, "MaxRoiPool": 21}
"""The opset beyond which ONNX Runtime (1.31, CPU) has no kernel of an op; CUDA has RoiAlign since
microsoft/onnxruntime#27646."""


def say_older_opset(model: ir.Model) -> None:
    """Set the opset to one in which every op has a kernel, in place, where all of the model means
    the same there.

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


# Kernels of dtypes

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


def fill_kernel_gaps(model: ir.Model) -> None:
    """Cast around every node that does not take what it reads or gives, in place."""
    opset = model.opset_imports[""]
    for node in list(model.graph.all_nodes()):
        if node.domain:
            continue
        if _reduces(node):
            compute_in(node, ir.DataType.FLOAT16, ir.DataType.FLOAT)
        if _reduces(node) or _lacks_bf16(node.op_type, opset):
            compute_in(node, ir.DataType.BFLOAT16, ir.DataType.FLOAT)
        for narrow, wide in _WIDER.get(node.op_type, ()):
            compute_in(node, narrow, wide)
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
        return compute_in(node, dtype, ir.DataType.INT32)


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


def compute_in(node: ir.Node, low: ir.DataType, wide: ir.DataType) -> None:
    """Cast what a node reads and gives in a dtype, so that it computes in a wider one, in place."""
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


# Rewrites of its optimizer


def keep_pads_of_max_pools(model: ir.Model) -> None:
    """Name the axes of every Pad that a MaxPool reads, in place.

    ONNX Runtime's optimizer (PadFusion, basic level, since microsoft/onnxruntime#18136; seen in
    1.31) takes a Pad with the value 0 before a MaxPool for the pool's own padding, which is one
    with -inf.  Where all values of a window are negative the result is another one: BiT's stem was
    off by 4 %.  The fusion passes a Pad by that names its axes.
    """
    for node in model.graph.all_nodes():
        readers = [use.node.op_type for output in node.outputs for use in output.uses()]
        if node.op_type == "Pad" and "MaxPool" in readers:
            _name_axes(model, node)


def _name_axes(model: ir.Model, node: ir.Node) -> None:
    source, _, *rest = node.inputs
    if source is None or source.shape is None or len(rest) > 1:
        return
    axes = np.arange(len(source.shape), dtype=np.int64)
    value = ir.Value(name=f"{node.outputs[0].name}_axes", const_value=ir.tensor(axes))
    value.shape, value.dtype = ir.Shape(axes.shape), ir.DataType.INT64
    model.graph.register_initializer(value)
    node.resize_inputs(4)
    node.replace_input_with(3, value)
