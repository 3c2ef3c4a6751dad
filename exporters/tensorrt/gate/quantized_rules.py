"""Rules for quantized values: TensorRT's requirements for scales, zero points and the use of fp8.

Sources: https://docs.nvidia.com/deeplearning/tensorrt/operators/docs/Quantize.html (symmetric,
scales of the input's type that are known when the engine is built),
https://docs.nvidia.com/deeplearning/tensorrt/11.0.0/inference-library/work-quantized-types.html,
and onnxOpImporters.cpp of onnx/onnx-tensorrt (positive scales, one per channel, no cast to fp8).
"""

from collections.abc import Iterator

import numpy as np
import onnx_ir as ir

from enginecast.exporters.tensorrt.gate.type_rules import FP8, LAYOUT, OTHER_FP8
from enginecast.exporters.tensorrt.gate.violations import Violation, at, constant_of, type_name

QUANTIZE, DEQUANTIZE = "QuantizeLinear", "DequantizeLinear"
PRODUCTS = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul"})
_QUANTIZED = frozenset({FP8, ir.DataType.INT8, ir.DataType.INT4, ir.DataType.FLOAT4E2M1})


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
    """One scale for all, or one for each slice of a weight."""
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
