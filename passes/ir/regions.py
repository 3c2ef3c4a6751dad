"""Regions: parts of a program that compute the same function with different weights.

    transformer_blocks.0: %add_7, %silu -> %add_12      a region is the nodes of one call of a
    transformer_blocks.1: %add_12, %silu -> %add_17     module; these two are equal

Two regions are equal when the graphs that are carved from them are the same text: the same ops with
the same constants and wiring, over inputs and weights of the same dtypes, sizes and strides.  Names
and classes of modules only say where to look.  Values of weights do not count: an epsilon that is a
tensor may differ.  Sizes count by their symbols, so that equal regions have equal ranges.

Values that a region computes without its weights and that others also read stay outside of it:
after `canonicalize`, the first region often computes values that the others share.
"""

import operator
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import SymBool, SymFloat, SymInt, Tensor
from torch.export import ExportedProgram
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from enginecast.library_names import aten
from enginecast.passes.ir.blocks import is_structured
from enginecast.passes.ir.computation import call_digest, digest
from enginecast.passes.ir.edit import first_input, input_names, insert, value, weight_expressions
from enginecast.passes.ir.effects import is_metadata_check, is_pure
from enginecast.passes.ir.source import module_calls
from enginecast.passes.ir.traits import Trait, has

SYMBOLIC = (SymInt, SymFloat, SymBool)
LEAST_PRODUCTS = 2
"""Fewest matrix products of a region: fewer is a single op with its surroundings, such as a
linear."""


@dataclass(frozen=True, eq=False)
class Region:
    """A part of a program, and the graph that computes it alone."""

    module: str
    """Path of the module whose call forms the region, such as "transformer_blocks.0"."""
    nodes: tuple[Node, ...]
    """In order. Nodes of two equal regions correspond by index, and so do the fields below."""
    inputs: tuple[Node, ...]
    """The values from outside that it reads."""
    weights: tuple[Node, ...]
    """Weights, and values computed only from weights."""
    results: tuple[Node, ...]
    """Its nodes that are read from outside."""
    graph: Graph
    """A copy that takes inputs and then weights, and returns the results."""
    digest: str
    """Equal exactly for equal regions of one program."""


def repeated_regions(program: ExportedProgram) -> list[tuple[Region, ...]]:
    """The regions that occur more than once, in groups of equal ones, outermost modules first.

    If a module's call equals no other, the modules that it calls are searched.
    """
    carver = Carver(program)
    waiting = [node for node in program.graph.nodes if carver.counts(node)]
    groups_of_equals: list[tuple[Region, ...]] = []
    depth = 0
    while True:
        calls: dict[str, list[Node]] = {}
        for node in waiting:
            is_item = node.target is operator.getitem
            stack = module_calls(first_input(node) if is_item else node)
            if len(stack) > depth:
                calls.setdefault(stack[depth], []).append(node)
        if not calls:
            return groups_of_equals
        groups: dict[str, list[Region]] = defaultdict(list)
        for module, nodes in calls.items():
            region = carver.region(module, nodes)
            if region is not None:
                groups[region.digest].append(region)
        repeated = [tuple(group) for group in groups.values() if len(group) > 1]
        groups_of_equals += repeated
        taken = {node for group in repeated for region in group for node in region.nodes}
        waiting = [node for node in waiting if node not in taken]
        depth += 1


class Carver:
    """Copies regions out of one program without changing it."""

    def __init__(self, program: ExportedProgram) -> None:
        self._weights = weight_expressions(program)
        names = set(input_names(program))
        self._inputs = [node for node in program.graph.nodes if node.name in names]

    def counts(self, node: Node) -> bool:
        """Whether a node counts as part of its module: sizes and weights do not, being inputs of a
        region.
        """
        return (
            node.op == "call_function"
            and node not in self._weights
            and not is_size(node)
            and not is_metadata_check(node)
        )

    def region(self, module: str, nodes: Sequence[Node]) -> Region | None:
        """The region of one module call; None if it is too small or cannot stand alone."""
        if not all(map(is_plain, nodes)):
            return None
        # Without what is read elsewhere and depends on no weight, and without its inputs.
        whole = set(nodes)
        own: set[Node] = set()  # depend on weights
        for node in nodes:
            sources = node.all_input_nodes
            if not own.isdisjoint(sources) or not self._weights.isdisjoint(sources):
                own.add(node)
        shared: set[Node] = set()
        for node in reversed(nodes):
            if node not in own and any(u in shared or _reads(u, whole) for u in node.users):
                shared.add(node)
        inside = [node for node in nodes if node not in shared]
        products = sum(has(node, Trait.HEAVY) for node in inside)
        return None if products < LEAST_PRODUCTS else self.carve(module, inside)

    def carve(self, module: str, nodes: Collection[Node]) -> Region | None:
        """The region of some nodes, given in topological order.

        None if a size in it cannot be derived from input sizes, or an op is separated from its
        results.
        """
        inside = dict.fromkeys(nodes)
        read = dict.fromkeys(
            source
            for node in inside
            for source in node.all_input_nodes
            if source not in inside and is_tensors(source)
        )
        weights = tuple(node for node in read if node in self._weights)
        inputs = [node for node in read if node not in self._weights]
        results = tuple(node for node in inside if any(_reads(user, inside) for user in node.users))
        sizes = [
            size
            for node in inside
            for size in node.all_input_nodes
            if size not in inside and not is_tensors(size)
        ]
        if not all(isinstance(value(node), Tensor) for node in (*read, *results)):
            return None
        roots: dict[Any, tuple[Node, int]] = {}
        for size in sizes:
            if not self._find_roots(size, inputs, roots):
                return None
        graph = _graph(inside, (*inputs, *weights), results, roots)
        return Region(module, tuple(inside), tuple(inputs), weights, results, graph, _digest(graph))

    def _find_roots(
        self, size: Node, inputs: list[Node], roots: dict[Any, tuple[Node, int]]
    ) -> bool:
        """Find an input dimension for each size; adds an input of the program if none of the region
        has it.
        """
        wanted = expression(size)
        if wanted in roots or not isinstance(value(size), SYMBOLIC):
            return True
        for node in (*inputs, *self._inputs):
            for dim, length in enumerate(getattr(value(node), "shape", ())):
                if isinstance(length, SymInt) and length.node.expr == wanted:
                    if node not in inputs:
                        inputs.append(node)
                    roots[wanted] = node, dim
                    return True
        parts = size.all_input_nodes
        return (
            bool(parts)
            and not any(map(is_tensors, parts))
            and all(self._find_roots(part, inputs, roots) for part in parts)
        )


def is_plain(node: Node) -> bool:
    """Whether a node only computes tensors, with sizes that do not depend on values."""
    return (
        is_tensors(node)
        and is_pure(node)
        and not is_structured(node)
        and not free_unbacked_symbols(value(node))
    )


def is_size(node: Node) -> bool:
    """Whether a node computes a size from sizes."""
    return not is_tensors(node) and is_pure(node) and not free_unbacked_symbols(value(node))


def is_tensors(node: Node) -> bool:
    """Whether a value is a tensor, or several."""
    fake = value(node)
    return isinstance(fake, Tensor) or (
        isinstance(fake, tuple | list) and any(isinstance(each, Tensor) for each in fake)
    )


def expression(size: Node) -> Any:
    """The symbolic expression of a size or of arithmetic on sizes; a number if nothing varies."""
    fake = value(size)
    return fake.node.expr if isinstance(fake, SYMBOLIC) else fake


def _reads(user: Node, inside: Collection[Node]) -> bool:
    """Whether a user outside of the region reads the value, and not only its size."""
    return user not in inside and not is_size(user) and not is_metadata_check(user)


def _graph(
    nodes: Iterable[Node],
    takes: Sequence[Node],
    results: Sequence[Node],
    roots: dict[Any, tuple[Node, int]],
) -> Graph:
    graph = Graph()
    known: dict[Node, Node] = {}
    sizes: dict[Any, Node] = {}
    for number, node in enumerate(takes):
        known[node] = graph.placeholder(f"value_{number}")
        known[node].meta["val"] = value(node)

    def find(node: Node) -> Any:
        if node in known:
            return known[node]
        wanted = expression(node)
        if not isinstance(value(node), SYMBOLIC):
            return wanted
        if wanted not in sizes:
            if wanted in roots:
                source, dim = roots[wanted]
                args: Any = (known[source], dim)
                sizes[wanted] = insert(graph, aten.sym_size.int, args, like=known[source])
            else:
                args, kwargs = torch.fx.map_arg((node.args, node.kwargs), find)
                assert callable(node.target)
                sizes[wanted] = insert(graph, node.target, args, kwargs, like=node)
        return sizes[wanted]

    for node in nodes:
        for source in node.all_input_nodes:
            find(source)  # before the op itself
        known[node] = graph.node_copy(node, find)
    graph.output(tuple(known[node] for node in results))
    return graph


def _digest(graph: Graph) -> str:
    """Digest of a graph's text with numbered nodes."""
    names: dict[Node, str] = {}
    parts = []
    for number, node in enumerate(graph.nodes):
        names[node] = f"%{number}"
        if node.op == "placeholder":
            fake = value(node)
            memory = (fake.dtype, fake.device, fake.layout, tuple(fake.shape), fake.stride())
            parts.append(" ".join(map(str, memory)))
        else:
            parts.append(call_digest(node, names))
    return digest(parts)
