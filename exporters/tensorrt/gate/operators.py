"""What TensorRT-RTX takes of each ONNX operator: `operators.json`, which `make trt-gate` writes.

TensorRT has the same parser, and plugins besides.
"""

from collections.abc import Iterator, Mapping
from functools import cache
from importlib.resources import files

import msgspec
import onnx.defs
import onnx_ir as ir
from msgspec import Struct
from onnx.defs import OpSchema

from enginecast.exporters.tensorrt.gate.violations import Violation, at, constant_of, type_name

FILE = "operators.json"
OPSET = 23
"""That the exporter writes; an operator that is newer was asked in its own."""
TYPES: Mapping[ir.DataType, str] = {
    ir.DataType.FLOAT: "FP32",
    ir.DataType.FLOAT16: "FP16",
    ir.DataType.BFLOAT16: "BF16",
    ir.DataType.FLOAT8E4M3FN: "FP8",
    ir.DataType.FLOAT4E2M1: "FP4",
    ir.DataType.INT32: "INT32",
    ir.DataType.INT64: "INT64",
    ir.DataType.INT8: "INT8",
    ir.DataType.INT4: "INT4",
    ir.DataType.UINT8: "UINT8",
    ir.DataType.BOOL: "BOOL",
}
"""TensorRT's names of the element types that it has; it narrows float64, and has no others."""
NOT_ASKED = ("INT4", "FP4")
"""They have no scale for a whole tensor: a network of one operator does not say what is taken."""
ONNX = ("", "ai.onnx")
"""Names of ONNX's own domain."""
PLUGINS = ("DeformConv", "RoiAlign")
"""Operators that TensorRT has plugins for, and TensorRT-RTX has not.
https://github.com/onnx/onnx-tensorrt/blob/10.15-GA/docs/operators.md"""
MX = ("trt", "TRT_MXFP8DequantizeLinear")
"""An operator of the parser's own, domain and name: fp8 in blocks of 32, scaled by uint8 that are
exponents (onnxOpImporters.cpp of onnx/onnx-tensorrt)."""
BUILDER = "builder: "
"""What a message begins with that is not the parser's."""
_RULES = {"rank": "rank", "computed": "constant", "input": "count", "output": "count"}
_RULES |= {"dynamic": "fixed-input", "types": "types"}
"""Names of rules, by the first word of what a table refuses; others are attributes."""
Bound = dict[str, str]
"""Element types by type variable: {"T": "FP32", "Tind": "INT64"}."""


class Operator(Struct, frozen=True, forbid_unknown_fields=True):
    """What was answered of one operator."""

    takes: tuple[str, ...]
    """Types of its variables, as products: "FP32 FP16;INT32 INT64" are four choices of two."""
    refused: dict[str, tuple[str, ...]]
    """Types, attributes, ranks and the like that are not taken, by what was said of them."""


class Table(Struct, frozen=True, forbid_unknown_fields=True):
    """The file."""

    library: str
    """With its version: "TensorRT-RTX 1.7.1.116"."""
    operators: dict[str, Operator]


@cache
def table() -> Table:
    """What is known."""
    text = files("enginecast.exporters.tensorrt.gate").joinpath(FILE).read_bytes()
    return msgspec.json.decode(text, type=Table)


@cache
def schema_of(op: str) -> OpSchema:
    """What ONNX says of an operator, in the opset of the table."""
    try:
        return onnx.defs.get_schema(op, OPSET)
    except onnx.defs.SchemaError:
        return onnx.defs.get_schema(op)


@cache
def type_variables(op: str) -> Mapping[str, tuple[str, ...]]:
    """The types that vary in an operator's inputs and first output, and what they can be."""
    schema = schema_of(op)
    used = {one.type_str for one in (*schema.inputs, *schema.outputs[:1])}
    known = {f"tensor({dtype.name.lower()})": name for dtype, name in TYPES.items()}
    found = {}
    for one in schema.type_constraints:
        names = [known[text] for text in one.allowed_type_strs if text in known]
        if one.type_param_str in used and len(one.allowed_type_strs) > 1:
            found[one.type_param_str] = tuple(names)
    return found


def unsupported(domain: str, op: str, *, plugins: bool = False) -> str:
    """Why an operator is not taken at all; empty if it is.

    Args:
        plugins: TensorRT's are there.
    """
    if (domain, op) == MX:
        return ""
    if domain not in ONNX:
        return f"an operator of the domain {domain}"
    if plugins and op in PLUGINS:
        return ""
    found = table().operators.get(op)
    if found is None:
        return "not asked"
    return "" if found.takes else next(iter(found.refused))


@cache
def lacks_bf16(op: str) -> bool:
    """Whether an operator is taken in fp32 and not in bf16."""
    found = table().operators.get(op)
    first = " ".join(product.partition(";")[0] for product in found.takes) if found else ""
    return "FP32" in first and "BF16" not in first


def check_operator(node: ir.Node, *, parsed: bool = False) -> Iterator[Violation]:
    """Types, attributes, ranks and the like of a node, by the table.

    Args:
        parsed: the parser takes the network, and is not asked again.
    """
    operator = table().operators.get(node.op_type)
    if operator is None or not operator.takes:
        return  # a plugin's
    yield from _check_types(node, operator, parsed=parsed)
    found = _features(node)
    for said, refused in operator.refused.items():
        if parsed and not said.startswith(BUILDER):
            continue
        for what in refused:
            if set(what.split(" & ")) <= found:
                rule = _RULES.get(what.split()[0], "attribute")
                yield at(node, rule, f"what {table().library} takes", f"{what}: {said}")


def _check_types(node: ir.Node, operator: Operator, *, parsed: bool) -> Iterator[Violation]:
    for value in (*node.inputs, *node.outputs):
        if value is None or value.dtype in TYPES:
            continue
        if value.dtype is not ir.DataType.DOUBLE:  # that is found everywhere
            got = f"{type_name(value.dtype)} of {value.name}"
            yield at(node, "types", ", ".join(TYPES.values()), got)
        return
    names = list(type_variables(node.op_type))
    for bound in _bound(node):
        if isinstance(bound, str):
            if not parsed:
                yield at(node, "mixed-types", "inputs of one element type", bound)
            return
        types = [bound.get(name, "") for name in names]
        if set(types) & set(NOT_ASKED) or _is_one_of(types, operator.takes):
            continue
        said = next(
            (text for text, refused in operator.refused.items() if _is_one_of(types, refused)), ""
        )
        if parsed and not said.startswith(BUILDER):
            continue
        got = " and ".join(filter(None, types))
        yield at(node, "types", " or ".join(operator.takes), f"{got}{said and ': '}{said}")


def _is_one_of(types: list[str], products: tuple[str, ...]) -> bool:
    """Whether the types are in one of the products; a type that is not bound is in all."""
    for product in products:
        choices = [part.split() for part in product.split(";")] if types else []
        if len(choices) == len(types) and all(
            not name or name in names for name, names in zip(types, choices, strict=True)
        ):
            return True
    return False


def _bound(node: ir.Node) -> Iterator[Bound | str]:
    """The types of a node's variables; what is mixed, where one variable has two.

    The outputs of If, Loop and Scan are of types of their own, each.
    """
    schema = schema_of(node.op_type)
    outputs = schema.outputs
    if outputs and not outputs[0].is_homogeneous:
        for value in node.outputs:
            assert value.dtype is not None
            yield {outputs[0].type_str: TYPES[value.dtype]}
        return
    found: dict[str, ir.Value] = {}
    given = [
        (schema.inputs[min(index, len(schema.inputs) - 1)], value)
        for index, value in enumerate(node.inputs)
    ]
    for parameter, value in (*given, *zip(outputs[:1], node.outputs, strict=False)):
        if value is None or parameter.type_str not in type_variables(node.op_type):
            continue
        first = found.setdefault(parameter.type_str, value)
        if first.dtype is not value.dtype:
            both = (f"{type_name(one.dtype)} of {one.name}" for one in (first, value))
            yield ", ".join(both)
            return
    yield {name: TYPES[value.dtype] for name, value in found.items() if value.dtype is not None}


def _features(node: ir.Node) -> set[str]:
    """What a table may refuse of a node, in its words."""
    first = node.inputs[0] if node.inputs else None
    shape = None if first is None else first.shape
    found = {f"input {index}" for index, value in enumerate(node.inputs) if value is not None}
    found |= {
        f"computed {index}"
        for index, value in enumerate(node.inputs)
        if value is not None and constant_of(value) is None
    }
    found |= {
        f"output {index}"
        for index, value in enumerate(node.outputs)
        if value.uses() or value.is_graph_output()
    }
    if shape is not None:
        found.add(f"rank {len(shape)}")
        if len(shape) and not isinstance(shape[0], int):
            found.add("dynamic")
    for attribute in node.attributes.values():
        found.add(label_of(attribute.name, attribute.value))
    return found


def label_of(name: str, value: object) -> str:
    """What a table calls an attribute: with its value, unless that is one of very many."""
    if isinstance(value, int | str):
        return f"{name}={value}"
    is_usual = not value or (isinstance(value, list | tuple) and set(value) == {1})
    return f"usual {name}" if is_usual else name
