"""Rules for operators: the forms that the parser accepts."""

from collections.abc import Callable, Iterator, Mapping

import numpy as np
import onnx_ir as ir

from enginecast.exporters.tensorrt.gate.operators import ONNX, Operator, opsets
from enginecast.exporters.tensorrt.gate.violations import Violation, at, constant_of

Rule = Callable[[ir.Node], Iterator[Violation]]


def check_opset(model: ir.Model, version: str) -> Iterator[Violation]:
    """The opset of ONNX's own domain."""
    first, last = opsets(version)
    found = {domain: n for domain, n in model.opset_imports.items() if domain in ONNX}
    for number in found.values() or [0]:
        if not first <= number <= last:
            expected = f"an opset of {first} to {last} for TensorRT {version}"
            yield Violation("opset", "", "", "", "", expected, str(number) if number else "none")


def check_form(node: ir.Node, operator: Operator) -> Iterator[Violation]:
    """Attributes, ranks, constants: everything but element types."""
    yield from _check_counts(node, operator)
    yield from _check_attributes(node, operator)
    for index, (fewest, most) in operator.rank.items():
        value = _input(node, index)
        shape = value.shape if value is not None else None
        if value is not None and shape is not None and not fewest <= len(shape) <= most:
            several = f"{fewest} to {most}" if fewest < most else str(fewest)
            expected = f"input {index} of {several} dimensions"
            yield at(node, "rank", expected, f"{len(shape)} of {value.name}")
    for index in operator.constant:
        value = _input(node, index)
        if value is not None and constant_of(value) is None:
            expected = f"input {index} known when the engine is built"
            yield at(node, "constant", expected, f"{value.name}, which is computed")
    for index, limit in operator.below.items():
        tensor = constant_of(_input(node, index))
        if tensor is not None and (np.asarray(tensor.numpy()) >= limit).any():
            yield at(node, "limit", f"input {index} below {limit}", str(tensor.numpy().max()))
    for name in operator.rules:
        yield from RULES[name](node)


def _input(node: ir.Node, index: int) -> ir.Value | None:
    return node.inputs[index] if index < len(node.inputs) else None


def _check_counts(node: ir.Node, operator: Operator) -> Iterator[Violation]:
    for what, values, most in (
        ("inputs", node.inputs, operator.inputs),
        ("outputs", [o for o in node.outputs if o.uses() or o.is_graph_output()], operator.outputs),
    ):
        extra = [v.name for v in values[most:] if v is not None] if most is not None else []
        if extra:
            yield at(node, "count", f"no more than {most} {what}", ", ".join(extra))


def _check_attributes(node: ir.Node, operator: Operator) -> Iterator[Violation]:
    for name, allowed in operator.only.items():
        attribute = node.attributes.get(name)
        if attribute is None:
            continue
        if not allowed:
            yield at(node, "attribute", f"no attribute {name}", str(attribute.value))
        elif attribute.value not in allowed:
            expected = " or ".join(map(str, allowed))
            yield at(node, "attribute", f"{name} {expected}", str(attribute.value))
    for name in operator.ones:
        attribute = node.attributes.get(name)
        if attribute is not None and set(attribute.value) - {1}:
            yield at(node, "attribute", f"{name} of ones", str(list(attribute.value)))


def _mask_or_causal(node: ir.Node) -> Iterator[Violation]:
    """IAttention: a causal attention has no mask beside it."""
    if node.attributes.get_int("is_causal", 0) and _input(node, 3) is not None:
        yield at(node, "mask-or-causal", "is_causal or a mask, not both", "both")


def _heads(node: ir.Node) -> Iterator[Violation]:
    """The parser splits the heads of three dimensions by the attributes that count them."""
    ranks = {len(v.shape) for v in node.inputs[:3] if v is not None and v.shape is not None}
    if len(ranks) > 1:
        got = " and ".join(map(str, sorted(ranks)))
        yield at(node, "heads", "queries, keys and values of as many dimensions", got)
    if ranks == {3}:
        counts = [node.attributes.get_int(name, 0) for name in ("q_num_heads", "kv_num_heads")]
        if 0 in counts:
            yield at(node, "heads", "q_num_heads and kv_num_heads for 3 dimensions", str(counts))


def _mask_shape(node: ir.Node) -> Iterator[Violation]:
    """IAttention: a mask is broadcast over batch and heads, and over nothing else."""
    values = [_input(node, index) for index in (0, 1, 3)]
    shapes = [v.shape for v in values if v is not None and v.shape is not None]
    if len(shapes) < 3 or min(map(len, shapes[:2])) < 2:
        return
    wanted, got = [shapes[0][-2], shapes[1][-2]], list(shapes[2])[-2:]
    if wanted != got:
        expected = f"a mask of {_sizes(wanted)} in its last dimensions"
        yield at(node, "mask-shape", expected, _sizes(got))


def _sizes(sizes: list[int | ir.SymbolicDim]) -> str:
    return " x ".join(map(str, sizes)) or "no dimension"


def _data_dependent(node: ir.Node) -> Iterator[Violation]:
    expected = "shapes that follow from those of the inputs"
    yield at(node, "data-dependent", expected, "as many as the values make it")


def _fixed_input(node: ir.Node) -> Iterator[Violation]:
    value = _input(node, 0)
    if value is None or value.shape is None or not value.shape.is_static():
        shape = None if value is None else value.shape
        yield at(node, "fixed-input", "an input of fixed shape", str(shape))


def _branch_ranks(node: ir.Node) -> Iterator[Violation]:
    branches = [node.attributes[name].as_graph() for name in ("then_branch", "else_branch")]
    for one, other in zip(*(branch.outputs for branch in branches), strict=False):
        if one.shape is not None and other.shape is not None and len(one.shape) != len(other.shape):
            got = f"{len(one.shape)} of {one.name}, {len(other.shape)} of {other.name}"
            yield at(node, "branch-ranks", "as many dimensions in either branch", got)


def _carried_shapes(node: ir.Node) -> Iterator[Violation]:
    """A Loop's body takes (number, condition, carried...) and gives (condition, carried...)."""
    body = node.attributes["body"].as_graph()
    for before, after in zip(body.inputs[2:], body.outputs[1:], strict=False):
        if before.shape is None or after.shape is None or before.shape == after.shape:
            continue
        got = f"{before.shape} of {before.name}, then {after.shape} of {after.name}"
        yield at(node, "carried-shapes", "one shape in every round", got)


def _scan_length(node: ir.Node) -> Iterator[Violation]:
    """What a Loop collects is as long as it has rounds."""
    body = node.attributes["body"].as_graph()
    collects = len(body.outputs) > len(body.inputs) - 1
    if collects and constant_of(_input(node, 0)) is None:
        expected = "a number of rounds that is known when the engine is built"
        yield at(
            node, "scan-length", expected, "a Loop that collects values for as long as it runs"
        )


RULES: Mapping[str, Rule] = {
    "heads": _heads,
    "mask-or-causal": _mask_or_causal,
    "mask-shape": _mask_shape,
    "data-dependent": _data_dependent,
    "fixed-input": _fixed_input,
    "branch-ranks": _branch_ranks,
    "carried-shapes": _carried_shapes,
    "scan-length": _scan_length,
}
"""By the names that the table uses."""
