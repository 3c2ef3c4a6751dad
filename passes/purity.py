"""Which nodes may be dropped when nothing uses them, and merged with equal ones."""

import operator

import torch
from torch.fx import Node

from enginecast import quantized_ops  # noqa: F401 - registers the ops that are named below
from enginecast.passes.structure import blocks, is_structured

aten = torch.ops.aten
own = torch.ops.enginecast
"""Namespace of our ops."""

ASSERTS = frozenset({aten._assert_tensor_metadata.default})
CHECKS = frozenset(
    {
        *ASSERTS,
        aten._assert_async.default,
        aten._assert_async.msg,
        aten._assert_scalar.default,
        aten.sym_constrain_range.default,
        aten.sym_constrain_range_for_size.default,
    }
)
"""Fail when the program runs, and compute nothing."""
DETACHES = frozenset({aten.detach_.default})
"""Say that they write, and change what autograd knows alone."""
UNFOLDABLE = frozenset(
    {own.dequantize.default, own.quantized_linear.default, own.blockwise_linear.default}
)
"""Tagged as random, so that no backend computes them beforehand, and draw nothing.  Nor do we: a
quantised weight that was computed into floats would be stored as such.
"""


def is_mutating(node: Node) -> bool:
    """Whether an op writes into one of its arguments."""
    if node.target in DETACHES:
        return False
    schema = getattr(node.target, "_schema", None)
    return bool(schema is not None and schema.is_mutable)


def is_pure(node: Node) -> bool:
    """Whether a node may be dropped when unused, and merged with an equal one."""
    if node.op != "call_function" or node.target in CHECKS or is_mutating(node):
        return False
    if is_structured(node):
        inner = (found for block in blocks(node) for found in block.module.graph.nodes)
        return all(is_pure(found) for found in inner if found.op == "call_function")
    # fx calls every op that can draw random numbers impure, whether or not this call draws any.
    draws_nothing = _without_dropout(node) or node.target in UNFOLDABLE
    return draws_nothing or node.target is operator.getitem or not node.is_impure()


def is_random(node: Node) -> bool:
    """Whether an op may draw random numbers: two equal calls are two values."""
    tagged = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
    return tagged and node.target not in UNFOLDABLE


def _without_dropout(node: Node) -> bool:
    """Whether an op that torch tags as random draws nothing here."""
    if node.target is aten.dropout.default:
        return node.args[2:3] == (False,)
    if node.target is aten.scaled_dot_product_attention.default:
        rate = node.args[4] if len(node.args) > 4 else node.kwargs.get("dropout_p", 0.0)
        return bool(rate == 0.0)
    return False
