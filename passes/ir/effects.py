"""Which nodes may be dropped when nothing uses them, or merged with equal ones, and which values an
in-place op may write into: rewrites leave those alone.
"""

import operator
from collections.abc import Iterator

import torch
from torch.fx import Graph, Node

from enginecast.passes.ir.blocks import blocks, is_structured
from enginecast.passes.ir.traits import Trait, has, is_identity

aten = torch.ops.aten
own = torch.ops.enginecast
"""Namespace of our ops."""


def is_mutating(node: Node) -> bool:
    """Whether an op writes into one of its arguments."""
    return has(node, Trait.WRITES)


def is_metadata_check(node: Node) -> bool:
    """Whether a node fails when a size, stride or dtype is another, and computes nothing."""
    return has(node, Trait.CHECKS | Trait.METADATA)


def is_pure(node: Node) -> bool:
    """Whether a node may be dropped when unused, and merged with an equal one."""
    if node.op != "call_function" or has(node, Trait.CHECKS, Trait.WRITES):
        return False
    if is_structured(node):
        inner = (found for block in blocks(node) for found in block.module.graph.nodes)
        return all(is_pure(found) for found in inner if found.op == "call_function")
    # fx calls every op that can draw random numbers impure, whether or not this call draws any.
    draws_nothing = _without_dropout(node) or has(node, Trait.UNFOLDABLE)
    return draws_nothing or node.target is operator.getitem or not node.is_impure()


def is_random(node: Node) -> bool:
    """Whether an op may draw random numbers: two equal calls are two values."""
    return has(node, Trait.RANDOM)


def _without_dropout(node: Node) -> bool:
    """Whether an op that torch tags as random draws nothing here."""
    if node.target is aten.scaled_dot_product_attention.default:
        rate = node.args[4] if len(node.args) > 4 else node.kwargs.get("dropout_p", 0.0)
        return bool(rate == 0.0)
    return is_identity(node)


def mutated_values(graph: Graph) -> set[Node]:
    """Every node that may share memory with an argument that some op writes into."""
    return set().union(*mutated_alias_sets(graph))


def mutated_alias_sets(graph: Graph) -> list[set[Node]]:
    """The nodes that may share one memory, for each memory that some op writes into."""
    family: dict[Node, Node] = {}
    for node in graph.nodes:
        family[node] = node
        for source in node.all_input_nodes if may_alias(node) else ():
            _join(family, source, node)
    written = {_head(family, target) for node in graph.nodes for target in _targets(node)}
    return [{n for n in family if _head(family, n) is head} for head in written]


def may_alias(node: Node) -> bool:
    """Whether a node's result may share memory with an argument."""
    if node.op != "call_function":
        return False
    return has(node, Trait.ALIASES) or not isinstance(node.target, torch._ops.OpOverload)


def _targets(node: Node) -> Iterator[Node]:
    """The arguments that a node writes into."""
    if not is_mutating(node):
        return
    assert isinstance(node.target, torch._ops.OpOverload)
    for position, argument in enumerate(node.target._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        given = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
        if isinstance(given, Node):
            yield given


def _head(family: dict[Node, Node], node: Node) -> Node:
    while family[node] is not node:
        family[node] = family[family[node]]
        node = family[node]
    return node


def _join(family: dict[Node, Node], left: Node, right: Node) -> None:
    family[_head(family, left)] = _head(family, right)


def mutated_placeholders(graph: Graph) -> set[Node]:
    """Placeholders whose memory some op of the graph may write into, directly or through views."""
    return {node for node in mutated_values(graph) if node.op == "placeholder"}


def reached_by(nodes: set[Node]) -> set[Node]:
    """The nodes and everything computed from them."""
    found, waiting = set(nodes), list(nodes)
    while waiting:
        fresh = waiting.pop().users.keys() - found
        found |= fresh
        waiting += fresh
    return found
