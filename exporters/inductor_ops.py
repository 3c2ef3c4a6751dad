"""Rewrite our fused ops into plain ones of aten, for compilers that fuse by themselves.

An op of our own is opaque to Inductor: it calls it, and fuses nothing into it.  So a program is
fused for the sake of the other targets and of what the fusions promise, and taken apart again here,
into forms that Inductor knows: one sdpa, one sum, one norm.
"""

import torch
from torch.export import ExportedProgram
from torch.fx import Node

import enginecast.ops  # noqa: F401 - registers enginecast::attention
from enginecast.exporters.rules import Rules, apply_rules
from enginecast.passes.graph_edit import aten, insert, shape_of

ours = torch.ops.enginecast


def plain_ops(program: ExportedProgram) -> None:
    """Take every fused op of ours apart, in place, within blocks too."""
    apply_rules(program, _RULES)


def _attention(program: ExportedProgram, node: Node) -> None:
    """Heads are split and merged by views; sdpa takes the rest as it is."""
    graph = program.graph
    query, key, value, bias, heads, kv_heads, scale, causal = node.args
    assert isinstance(query, Node)
    is_flat = len(shape_of(query)) == 3
    with graph.inserting_before(node):
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
        if is_flat:
            result = insert(graph, aten.transpose.int, (result, 1, 2), like=node)
            result = insert(graph, aten.flatten.using_ints, (result, 2), like=node)
    node.replace_all_uses_with(result)
    graph.erase_node(node)


def _heads_first(program: ExportedProgram, part: object, heads: object, like: Node) -> Node:
    assert isinstance(part, Node)
    if len(shape_of(part)) == 4:
        return part
    split = insert(program.graph, aten.unflatten.int, (part, 2, [heads, -1]), like=like)
    return insert(program.graph, aten.transpose.int, (split, 1, 2), like=like)


def _skip_rms_norm(program: ExportedProgram, node: Node) -> None:
    graph = program.graph
    x, residual, weight, epsilon = node.args
    assert isinstance(x, Node)
    with graph.inserting_before(node):
        total = insert(graph, aten.add.Tensor, (x, residual), like=node)
        size = [shape_of(x)[-1]]
        normed = insert(graph, aten.rms_norm.default, (total, size, weight, epsilon), like=node)
    results = (normed, total)
    for user in list(node.users):
        user.replace_all_uses_with(results[int(user.args[1])])  # type: ignore[arg-type]
        graph.erase_node(user)
    graph.erase_node(node)


_RULES: Rules = {
    ours.attention.default: _attention,
    ours.skip_rms_norm.default: _skip_rms_norm,
}
