"""Rules that no table of operators and types can say: scales, zero points, what a branch and a loop
return, float64.

Each was asked of TensorRT-RTX, in a network that keeps it and in one that does not.
"""

from collections.abc import Iterator

import numpy as np
import onnx_ir as ir

from enginecast.exporters.tensorrt.gate.operators import TYPES
from enginecast.exporters.tensorrt.gate.violations import (
    Violation,
    at,
    constant_of,
    of_value,
    type_name,
)

QUANTIZE, DEQUANTIZE = "QuantizeLinear", "DequantizeLinear"


def check_values(graph: ir.Graph) -> Iterator[Violation]:
    """Inputs, outputs and weights of element types that TensorRT has, and float64 nowhere.

    The parser takes it, and makes float32 of it: sizes that are computed in it could be others,
    and the engine would have other inputs and outputs than the bundle says.
    """
    values = {id(v): v for v in (*graph.inputs, *graph.outputs, *graph.initializers.values())}
    inside = {id(v): v for node in graph.all_nodes() for v in node.outputs}
    for value in (values | inside).values():
        if value.dtype is ir.DataType.DOUBLE:
            got = f"DOUBLE of {value.name}"
            yield of_value(value, "float64", "no float64, which is narrowed", got)
        elif id(value) in values and value.dtype not in TYPES:
            yield of_value(value, "types", ", ".join(TYPES.values()), type_name(value.dtype))


def check_quantized(node: ir.Node) -> Iterator[Violation]:
    """Scales and zero points."""
    if node.op_type not in (QUANTIZE, DEQUANTIZE):
        return
    value, scale = node.inputs[0], node.inputs[1]
    assert value is not None
    assert scale is not None
    tensor = constant_of(scale)
    if tensor is None:
        # Scales that are scaled themselves are looked at where they are read.
        if scale.shape is not None and scale.shape.is_static():
            yield from _check_axis(node, value, tuple(int(size) for size in scale.shape))
    else:
        numbers = np.asarray(tensor.numpy()).astype(np.float64)
        wrong = numbers[~(numbers > 0)]
        if wrong.size:
            got = f"{wrong.flat[0]:g} in {scale.name}"
            yield at(node, "scale-positive", "scales above 0", got)
        yield from _check_axis(node, value, tuple(numbers.shape))
    zero = node.inputs[2] if len(node.inputs) > 2 else None
    zeros = constant_of(zero)
    if zeros is not None and np.asarray(zeros.numpy()).astype(np.float64).any():
        assert zero is not None
        yield at(node, "zero-point", "no zero point, or zeros", f"{zero.name}, which is not zero")


def _check_axis(node: ir.Node, value: ir.Value, sizes: tuple[int, ...]) -> Iterator[Violation]:
    """One scale for all, or one for each slice along an axis; blocks are as the scales are."""
    axis, shape = node.attributes.get_int("axis", 1), value.shape
    if len(sizes) != 1 or sizes == (1,) or shape is None or not -len(shape) <= axis < len(shape):
        return
    if shape[axis] != sizes[0]:
        expected = f"{shape[axis]} scales, one for each slice along axis {axis}"
        yield at(node, "scale-shape", expected, str(sizes[0]))


def check_blocks(node: ir.Node) -> Iterator[Violation]:
    """What the branches of an If and the rounds of a Loop return."""
    if node.op_type == "If":
        branches = [node.attributes[name].as_graph() for name in ("then_branch", "else_branch")]
        for one, other in zip(*(branch.outputs for branch in branches), strict=False):
            if one.shape is None or other.shape is None or len(one.shape) == len(other.shape):
                continue
            got = f"{len(one.shape)} of {one.name}, {len(other.shape)} of {other.name}"
            yield at(node, "branch-ranks", "as many dimensions in either branch", got)
    if node.op_type == "Loop":
        body = node.attributes["body"].as_graph()
        # A body takes (number, condition, carried...) and gives (condition, carried...).
        for before, after in zip(body.inputs[2:], body.outputs[1:], strict=False):
            if before.shape is None or after.shape is None or before.shape == after.shape:
                continue
            got = f"{before.shape} of {before.name}, then {after.shape} of {after.name}"
            yield at(node, "carried-shapes", "one shape in every round", got)
