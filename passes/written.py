"""Which values an in-place op may write into: rewrites leave them and their readers alone."""

import operator
from collections.abc import Iterator

import torch
from torch.export import ExportedProgram
from torch.fx import Graph, Node

from enginecast.passes.graph_edit import aten
from enginecast.passes.purity import is_mutating

# Return their input itself when they draw nothing, which their schemas do not say.
_MAY_RETURN_INPUT = frozenset({operator.getitem, aten.dropout.default})


def written_values(graph: Graph) -> set[Node]:
    """Every node that may share memory with an argument that some op writes into."""
    return set().union(*written_families(graph))


def written_families(graph: Graph) -> list[set[Node]]:
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
    if node.target in _MAY_RETURN_INPUT or not isinstance(node.target, torch._ops.OpOverload):
        return True
    return any(result.alias_info is not None for result in node.target._schema.returns)


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


def written_placeholders(program: ExportedProgram) -> set[Node]:
    """Placeholders whose memory some op of the graph writes to, directly or through views."""
    found: set[Node] = set()
    for node in program.graph.nodes:
        if node.op == "call_function" and is_mutating(node):
            for source in _aliased(node, written=True):
                found |= _origins(source)
    return found


def _origins(node: Node) -> set[Node]:
    if node.op == "placeholder":
        return {node}
    found: set[Node] = set()
    for source in _aliased(node, written=False):
        found |= _origins(source)
    return found


def _aliased(node: Node, *, written: bool) -> Iterator[Node]:
    """Arguments whose memory the result may share, or (`written`) that the op writes to."""
    schema = getattr(node.target, "_schema", None)
    for position, argument in enumerate(schema.arguments if schema is not None else ()):
        given = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
        alias = argument.alias_info
        if isinstance(given, Node) and alias is not None and (alias.is_write or not written):
            yield given


def reached_by(nodes: set[Node]) -> set[Node]:
    """The nodes and everything computed from them."""
    found: set[Node] = set()
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting += node.users
    return found
