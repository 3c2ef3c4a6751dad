"""Rules for element types: each operator accepts certain types, and a node may not mix them.

TensorRT types a network strongly: nothing is cast that the graph does not cast.
Source: https://docs.nvidia.com/deeplearning/tensorrt/11.0.0/_static/c-api, and the table's.
"""

from collections.abc import Iterator

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
