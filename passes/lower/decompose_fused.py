"""Rewrite our fused ops into plain ones of aten, for compilers that fuse by themselves.

    before:  %a = enginecast.attention(%q, %k, %v, ...)
             %n = enginecast.skip_rms_norm(%x, %y, %w, 1e-6)
    after:   %a = aten.scaled_dot_product_attention(%q, %k, %v, ...)
             %s = aten.add.Tensor(%x, %y)
             %n = aten.rms_norm(%s, [d], %w, 1e-6)

An op of our own is opaque to such a compiler: it calls it, and fuses nothing into it.  Promises
`exact`: the plain forms are what our ops are defined by.
"""

import operator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx import Node

from enginecast.ops.rules import Rules
from enginecast.passes.ir.base import GraphPass, PassContext, ProgramView, Promise, Site
from enginecast.passes.ir.edit import aten, insert, shape_of
from enginecast.passes.ir.rules import Rewrite, apply_rules

ours = torch.ops.enginecast

RULES: Rules[Rewrite] = Rules()
"""Op -> what replaces a call of it."""


@dataclass(frozen=True)
class DecomposeFused(GraphPass):
    """Take fused ops of ours apart into those that torch's compilers know."""

    name: ClassVar[str] = "decompose-fused"
    promise: ClassVar[Promise] = "exact"

    def run(self, program: ProgramView, context: PassContext) -> list[Site]:
        return apply_rules(program, context, RULES)


@RULES.rule(ours.attention.default)
def _attention(program: ProgramView, node: Node) -> Node:
    """Heads are split and merged by views; sdpa takes the rest as it is."""
    graph = program.graph
    query, key, value, bias, heads, kv_heads, scale, causal = node.args
    assert isinstance(query, Node)
    parts = [
        _heads_first(program, part, count, node)
        for part, count in ((query, heads), (key, kv_heads), (value, kv_heads))
    ]
    result = insert(
        graph,
        aten.scaled_dot_product_attention.default,
        (*parts, bias, 0.0, causal),
        {"scale": scale, "enable_gqa": heads != kv_heads},
        like=node,
    )
    if len(shape_of(query)) == 4:
        return result
    result = insert(graph, aten.transpose.int, (result, 1, 2), like=node)
    return insert(graph, aten.flatten.using_ints, (result, 2), like=node)


def _heads_first(program: ProgramView, part: object, heads: object, like: Node) -> Node:
    assert isinstance(part, Node)
    if len(shape_of(part)) == 4:
        return part
    split = insert(program.graph, aten.unflatten.int, (part, 2, [heads, -1]), like=like)
    return insert(program.graph, aten.transpose.int, (split, 1, 2), like=like)


@RULES.rule(ours.skip_rms_norm.default)
def _skip_rms_norm(program: ProgramView, node: Node) -> Node:
    graph = program.graph
    x, residual, weight, epsilon = node.args
    assert isinstance(x, Node)
    total = insert(graph, aten.add.Tensor, (x, residual), like=node)
    size = [shape_of(x)[-1]]
    normed = insert(graph, aten.rms_norm.default, (total, size, weight, epsilon), like=node)
    for user in list(node.users):
        assert user.target is operator.getitem
        user.replace_all_uses_with((normed, total)[int(user.args[1])])  # type: ignore[arg-type]
        graph.erase_node(user)
    return normed
