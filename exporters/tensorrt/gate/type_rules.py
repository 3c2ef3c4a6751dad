"""Rules for element types, those of quantized values among them: each operator accepts certain
types, and a node may not mix them.

TensorRT types a network strongly: nothing is cast that the graph does not cast.

Sources: https://docs.nvidia.com/deeplearning/tensorrt/11.0.0/_static/c-api, and the table's;
https://docs.nvidia.com/deeplearning/tensorrt/operators/docs/Quantize.html (symmetric,
scales of the input's type that are known when the engine is built),
https://docs.nvidia.com/deeplearning/tensorrt/11.0.0/inference-library/work-quantized-types.html,
and onnxOpImporters.cpp of onnx/onnx-tensorrt (positive scales, one per channel, no cast to fp8).
"""

from collections.abc import Iterator, Mapping

import numpy as np
import onnx_ir as ir

from enginecast.exporters.tensorrt.gate.operators import SAME, TYPES, Operator, table
from enginecast.exporters.tensorrt.gate.violations import (
    Violation,
    at,
    constant_of,
    of_value,
    type_name,
)

LAYOUT = frozenset({"Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten", "Identity"})
"""They move values and compute none: fp8 may pass them on its way to a DequantizeLinear."""
FP8 = ir.DataType.FLOAT8E4M3FN
OTHER_FP8 = frozenset(
    {
        ir.DataType.FLOAT8E4M3FNUZ,
        ir.DataType.FLOAT8E5M2,
        ir.DataType.FLOAT8E5M2FNUZ,
        ir.DataType.FLOAT8E8M0,
    }
)
"""fp8 that TensorRT does not have."""
QUANTIZE, DEQUANTIZE = "QuantizeLinear", "DequantizeLinear"
PRODUCTS = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul"})
_QUANTIZED = frozenset({FP8, ir.DataType.INT8, ir.DataType.INT4, ir.DataType.FLOAT4E2M1})
BLOCKS: Mapping[ir.DataType | None, tuple[int, ...]] = {
    ir.DataType.INT4: (64, 128),
    ir.DataType.FLOAT4E2M1: (16,),
}
"""Sizes of the blocks that share a scale, by what they are of."""
_INT32 = np.iinfo(np.int32)
_READ = 1 << 16
"""Elements up to which a constant is read: what indexes or sizes a tensor is short."""


def check_borders(graph: ir.Graph) -> Iterator[Violation]:
    """Inputs, outputs and weights of element types that TensorRT has; fp8 in weights alone."""
    values = {id(v): v for v in (*graph.inputs, *graph.outputs, *graph.initializers.values())}
    for value in values.values():
        if value.dtype is ir.DataType.DOUBLE:
            yield of_value(value, "float64", "no float64, which TensorRT narrows", "DOUBLE")
        elif value.dtype in OTHER_FP8:
            yield of_value(value, "fp8-format", "fp8 as FLOAT8E4M3FN", type_name(value.dtype))
        elif value.dtype not in TYPES:
            yield of_value(value, "types", ", ".join(TYPES.values()), type_name(value.dtype))
        elif value.dtype is FP8 and (value.is_graph_input() or value.is_graph_output()):
            expected = "fp8 inside of the network only"
            yield of_value(value, "fp8-route", expected, "fp8 at its border")


def check_node(node: ir.Node, operator: Operator) -> Iterator[Violation]:
    """All that is asked of the types of one node."""
    data = _data_values(node, operator)
    takes = table().expand(operator.takes)
    for value in data:
        if node.op_type in LAYOUT and value.dtype is FP8:
            continue
        if value.dtype is None or TYPES.get(value.dtype) not in takes:
            yield _untaken(node, value, takes)
            break
    if operator.reads == "inputs" and len({value.dtype for value in data}) > 1:
        got = ", ".join(f"{type_name(value.dtype)} of {value.name}" for value in data)
        yield at(node, "mixed-types", "inputs of one element type", got)
    yield from _check_others(node, operator, data)
    if operator.gives and node.outputs[0].dtype is not None:
        gives = table().expand(operator.gives)
        if TYPES.get(node.outputs[0].dtype) not in gives:
            yield _untaken(node, node.outputs[0], gives)


def _data_values(node: ir.Node, operator: Operator) -> list[ir.Value]:
    """What the operator's types are of."""
    if operator.reads == "output":
        return list(node.outputs[:1])
    if operator.reads == "outputs":
        return list(node.outputs)
    inputs = enumerate(node.inputs[:1] if operator.apart else node.inputs)
    return [value for i, value in inputs if value is not None and i not in operator.others]


def _untaken(node: ir.Node, value: ir.Value, takes: frozenset[str]) -> Violation:
    name = value.name or "a value"
    if value.dtype is ir.DataType.DOUBLE:
        return at(node, "float64", "no float64, which TensorRT narrows", f"DOUBLE of {name}")
    expected = ", ".join(sorted(takes))
    return at(node, "types", f"one of {expected}", f"{type_name(value.dtype)} of {name}")


def _check_others(node: ir.Node, operator: Operator, data: list[ir.Value]) -> Iterator[Violation]:
    for index, words in operator.others.items():
        value = node.inputs[index] if index < len(node.inputs) else None
        if value is None:
            continue
        allowed = table().expand(words)
        if SAME in allowed and data and value.dtype is data[0].dtype:
            continue
        if value.dtype is None or TYPES.get(value.dtype) not in allowed:
            named = [type_name(data[0].dtype)] if SAME in allowed and data else []
            expected = " or ".join([*named, *sorted(allowed - {SAME})])
            got = f"{type_name(value.dtype)} of {value.name}"
            yield at(node, "mixed-types", f"input {index} of {expected}", got)
        elif index not in operator.wide:
            yield from _check_range(node, index, value)


def _check_range(node: ir.Node, index: int, value: ir.Value) -> Iterator[Violation]:
    """Indices, axes and sizes: the parser reads many of them as 32 bits."""
    tensor = constant_of(value)
    if tensor is None or tensor.dtype is not ir.DataType.INT64 or tensor.size > _READ:
        return
    numbers = tensor.numpy()
    if numbers.size and (numbers.min() < _INT32.min or numbers.max() > _INT32.max):
        worst = numbers.flat[np.abs(numbers.astype(np.float64)).argmax()]
        yield at(node, "int64-range", f"numbers within int32 in input {index}", str(worst))


def check_quantized(node: ir.Node) -> Iterator[Violation]:
    """All that is asked of one node."""
    yield from _check_fp8(node)
    if node.op_type in (QUANTIZE, DEQUANTIZE):
        yield from _check_scale(node)
        yield from _check_zero_point(node)
    if node.op_type in PRODUCTS:
        yield from _check_product(node)


def _check_fp8(node: ir.Node) -> Iterator[Violation]:
    values = [value for value in (*node.inputs, *node.outputs) if value is not None]
    for value in values:
        if value.dtype in OTHER_FP8:
            got = f"{type_name(value.dtype)} of {value.name}"
            yield at(node, "fp8-format", "fp8 as FLOAT8E4M3FN", got)
    if not any(value.dtype is FP8 for value in values):
        return
    if node.op_type in ("Cast", "CastLike"):
        types = " to ".join(
            type_name(value.dtype) for value in (node.inputs[0], node.outputs[0]) if value
        )
        yield at(node, "fp8-cast", f"{QUANTIZE} or {DEQUANTIZE}, not a cast", types)
    elif node.op_type not in (QUANTIZE, DEQUANTIZE, "Constant", *LAYOUT):
        expected = f"fp8 read by {DEQUANTIZE} or by what only moves it"
        yield at(node, "fp8-route", expected, f"{node.op_type} of fp8")


def _check_scale(node: ir.Node) -> Iterator[Violation]:
    value, scale = node.inputs[0], node.inputs[1]
    assert value is not None
    assert scale is not None
    wide = value if node.op_type == QUANTIZE else node.outputs[0]
    if scale.dtype is not wide.dtype:
        got = f"{type_name(scale.dtype)} for {type_name(wide.dtype)}"
        yield at(node, "scale-type", "a scale in the type of the value", got)
    producer = scale.producer()
    is_quantized = producer is not None and producer.op_type == DEQUANTIZE
    if is_quantized and scale.shape is not None and constant_of(producer.inputs[0]) is not None:
        # What scales these scales is looked at where it is read.
        yield from _check_axis(node, value, tuple(int(size) for size in scale.shape))
        return
    tensor = constant_of(scale)
    if tensor is None:
        expected = "a scale that is known when the engine is built"
        yield at(node, "scale-constant", expected, f"{scale.name}, which is computed")
        return
    numbers = np.asarray(tensor.numpy()).astype(np.float64)
    if not (np.isfinite(numbers) & (numbers > 0)).all():
        wrong = numbers[~(np.isfinite(numbers) & (numbers > 0))].flat[0]
        yield at(node, "scale-positive", "scales above 0 and finite", f"{wrong:g} in {scale.name}")
    yield from _check_axis(node, value, tuple(numbers.shape))


def _check_axis(node: ir.Node, value: ir.Value, sizes: tuple[int, ...]) -> Iterator[Violation]:
    """One scale for all, one for each slice of a weight, or one for each block along one axis."""
    block = node.attributes.get_int("block_size", 0)
    if block:
        yield from _check_blocks(node, value, sizes, block)
        return
    if int(np.prod(sizes)) == 1:
        return
    if len(sizes) != 1:
        yield at(node, "scale-shape", "one scale, or one for each channel", f"scales {list(sizes)}")
        return
    if constant_of(_moved_from(value)) is None:
        expected = "one scale for values that are computed"
        yield at(node, "scale-axis", expected, f"{sizes[0]} scales for {value.name}")
    axis = node.attributes.get_int("axis", 1)
    shape = value.shape
    if shape is not None and -len(shape) <= axis < len(shape) and shape[axis] != sizes[0]:
        expected = f"{shape[axis]} scales, one for each slice along axis {axis}"
        yield at(node, "scale-shape", expected, str(sizes[0]))


def _check_blocks(
    node: ir.Node, value: ir.Value, sizes: tuple[int, ...], block: int
) -> Iterator[Violation]:
    if constant_of(_moved_from(value)) is None:
        expected = "one scale for values that are computed"
        yield at(node, "scale-axis", expected, f"blocks of {value.name}")
    allowed = BLOCKS.get(value.dtype, ())
    if block not in allowed:
        expected = f"blocks of {' or '.join(map(str, allowed))}" if allowed else "no blocks"
        got = f"blocks of {block} of {type_name(value.dtype)}"
        yield at(node, "block-size", f"{expected} for {type_name(value.dtype)}", got)
    if value.shape is None:
        return
    axis = node.attributes.get_int("axis", 1) % len(value.shape)
    wanted = [int(size) for size in value.shape]
    wanted[axis], rest = divmod(wanted[axis], block)
    if rest or wanted != list(sizes):
        expected = f"a scale for each {block} along axis {axis} of {_sizes(value.shape)}"
        yield at(node, "scale-shape", expected, f"scales {list(sizes)}")


def _sizes(shape: ir.Shape) -> str:
    return " x ".join(map(str, shape))


def _check_zero_point(node: ir.Node) -> Iterator[Violation]:
    zero = node.inputs[2] if len(node.inputs) > 2 else None
    quantized = node.outputs[0] if node.op_type == QUANTIZE else node.inputs[0]
    assert quantized is not None
    if quantized.dtype not in _QUANTIZED and quantized.dtype not in OTHER_FP8:
        got = f"{type_name(quantized.dtype)} of {quantized.name}"
        yield at(node, "quantized-type", "signed values: FP8, INT8, INT4 or FP4", got)
    if zero is None:
        return
    tensor = constant_of(zero)
    if tensor is None or np.asarray(tensor.numpy()).astype(np.float64).any():
        got = f"{zero.name}, which is {'computed' if tensor is None else 'not zero'}"
        yield at(node, "zero-point", "no zero point, or zeros", got)


def _check_product(node: ir.Node) -> Iterator[Violation]:
    """Quantized values times a weight that is not: the weight was dequantized when constants were
    folded, and is stored four times as large.
    """
    operands = [_moved_from(value) for value in node.inputs[:2] if value is not None]
    kinds = [_kind(value) for value in operands]
    if kinds == ["quantized", "constant"]:
        got = f"a weight of {type_name(operands[1].dtype)}"
        yield at(node, "folded-weight", "a quantized weight for quantized values", got)


def _kind(value: ir.Value) -> str:
    producer = value.producer()
    if producer is not None and producer.op_type == DEQUANTIZE:
        source = producer.inputs[0]
        return "quantized" if source is not None and constant_of(source) is None else "weight"
    return "constant" if constant_of(value) is not None else "computed"


def _moved_from(value: ir.Value) -> ir.Value:
    """What a value was before it was transposed, reshaped and the like."""
    producer: ir.Node | None = value.producer()
    while producer is not None and producer.op_type in LAYOUT and producer.inputs[0] is not None:
        value = producer.inputs[0]
        producer = value.producer()
    return value
