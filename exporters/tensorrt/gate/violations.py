"""The violations that the gate reports, and helpers that its rules use on a graph."""

from dataclasses import dataclass

import onnx_ir as ir


@dataclass(frozen=True)
class Violation:
    """One thing that TensorRT does not take."""

    rule: str
    """Its name, such as "mixed-types"."""
    node: str
    """The node, or the input or value that is meant."""
    op: str
    """Operator of the node; "" where no node is meant."""
    module: str
    """Dotted path of the user's module; "" where it is not known."""
    line: str
    """FILE:LINE of the user's code; "" where it is not known."""
    expected: str
    got: str

    def __str__(self) -> str:
        place = [f"module '{self.module}'" if self.module else "", self.line]
        found = ", ".join(part for part in (self.op, *place) if part)
        name = f"'{self.node}'" if self.node else "the network"
        return (
            f"{name}{f' ({found})' if found else ''}: expected {self.expected}, got {self.got}"
            f" [{self.rule}]"
        )


def at(node: ir.Node, rule: str, expected: str, got: str) -> Violation:
    """A violation of a node."""
    return Violation(
        rule,
        node.name or (node.outputs[0].name if node.outputs else "") or "",
        f"{node.domain}::{node.op_type}" if node.domain else node.op_type,
        node.metadata_props.get("enginecast.module", ""),
        node.metadata_props.get("enginecast.line", ""),
        expected,
        got,
    )


def of_value(value: ir.Value, rule: str, expected: str, got: str) -> Violation:
    """A violation of a value: of the node that makes it, if there is one."""
    producer = value.producer()
    if producer is not None:
        return at(producer, rule, expected, got)
    return Violation(rule, value.name or "", "", "", "", expected, got)


def constant_of(value: ir.Value | None) -> ir.TensorProtocol | None:
    """The tensor of a value that is constant at build time; None if it is not.

    Through Identity alone: a graph that is lowered has its constants folded.
    """
    while value is not None and not value.is_graph_input():
        if value.is_initializer() or value.const_value is not None:
            return value.const_value
        node = value.producer()
        if node is None:
            return None
        if node.op_type == "Constant":
            return _attribute_tensor(node)
        value = node.inputs[0] if node.op_type == "Identity" else None
    return None


def _attribute_tensor(node: ir.Node) -> ir.TensorProtocol | None:
    for name, attribute in node.attributes.items():
        if name == "value":
            return attribute.as_tensor()
        if name in ("value_int", "value_ints", "value_float", "value_floats"):
            dtype = ir.DataType.INT64 if "int" in name else ir.DataType.FLOAT
            return ir.tensor(attribute.value, dtype=dtype)
    return None


def type_name(dtype: ir.DataType | None) -> str:
    """ "FLOAT16"; a dtype that the graph does not say is "no element type"."""
    return "no element type" if dtype is None else dtype.name
