"""Take the weight expressions out of a program: each is computed once, when the engine is written.

    before:  %p: f32[128, 64] = parameter "q.weight"  after:  %w: f16[64, 128] = deferred "q.weight"
             %low = aten.to.dtype(%p, f16)
             %wt = aten.t(%low)
             %y = aten.matmul(%x, %wt)                        %y = aten.matmul(%x, %w)

A complex value is stored as pairs of real ones.

Beside the program travels the expression of `%p` that gives the value (see `deferred_weights`): so
nothing is computed here, and whoever runs the program computes one weight at a time.  Left alone is
an expression that is much larger than the weights it reads (an expand of a table): the engine
computes it.

Promises `reordered`: values stay, but a product with a contiguous weight may add in another order
than with the transposed view of one.
"""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec
from torch.fx import Graph, Node

from enginecast.passes.ir.base import Pass, PassContext, Promise, Site
from enginecast.passes.ir.blocks import carried, is_structured, operands
from enginecast.passes.ir.deferred_weights import (
    DeferredWeight,
    Expression,
    defer_weights,
    deferred_weight,
    deferred_weights,
)
from enginecast.passes.ir.edit import (
    add_weights,
    aten,
    drop_unused_weights,
    erase_dead,
    free_names,
    insert,
    value,
    weight_expressions,
    weight_specs,
    weight_tensor,
)
from enginecast.passes.ir.effects import is_metadata_check
from enginecast.passes.ir.match import is_call
from enginecast.passes.ir.sites import SiteLog

GROWTH = 4096
"""Elements that an expression may have beyond its weights: an expand of a table is cheaper to
compute than to store.
"""
SHARE = 32
"""An expression may also be larger than its weights by one part of so many: rows with a margin."""


@dataclass(frozen=True)
class HoistWeights(Pass):
    """Compute what depends only on weights once, while the engine is written."""

    name: ClassVar[str] = "hoist-weights"
    after: ClassVar[frozenset[str]] = frozenset({"lift-weights"})
    promise: ClassVar[Promise] = "reordered"
    covers_blocks: ClassVar[bool] = True  # lift-weights has left no weight expression in them

    def run(self, program: ExportedProgram, context: PassContext) -> list[Site]:
        """Replace every maximal weight expression by a placeholder without data."""
        log = SiteLog(context)
        # An assert about a weight would count as a reader of it, beside the expression.
        for node in weight_expressions(program):
            for user in list(node.users):
                if is_metadata_check(user):
                    program.graph.erase_node(user)
        stored = _stored(program, log)
        _store_pairs(program, stored, log)
        specs = weight_specs(program)
        roots = [
            node
            for node in program.graph.nodes
            if _is_root(node, stored)
            # An earlier run of this pass may have left some.
            and (
                node.name not in specs
                or deferred_weight(program, str(specs[node.name].target)) is None
            )
        ]
        # Names and values come from the graph as it is now.
        found = [
            (root, _base_name(program, specs, root), _expression(program, specs, root))
            for root in roots
        ]
        # Flat targets: "a.weight" beside "a.weight.1" would be a parameter inside a parameter.
        targets = list(itertools.islice(free_names(program, "hoisted"), len(roots)))
        empty = {target: _without_data(root) for target, root in zip(targets, roots, strict=True)}
        nodes = add_weights(program, empty, InputKind.PARAMETER)
        hoisted: dict[str, DeferredWeight] = {}
        for node, target, (root, name, expression) in zip(nodes, targets, found, strict=True):
            node.meta["val"] = value(root).contiguous()
            for user in list(root.users):
                if user not in stored:
                    user.replace_input_with(root, node)
            shape, dtype = tuple(value(root).shape), value(root).dtype
            hoisted[target] = DeferredWeight(name, dtype, shape, expression)
            if root.op == "call_function":
                log.done(root)
        defer_weights(program, hoisted)
        erase_dead(program.graph)
        drop_unused_weights(program)
        # A weight that only an expression too large to store reads goes with that expression.
        taken: set[str] = set()
        named = {}
        for target, weight in deferred_weights(program).items():
            # name.1, name.2 where one weight is stored in several forms.
            numbered = (f"{weight.name}.{count}" for count in itertools.count(1))
            free = next(n for n in itertools.chain([weight.name], numbered) if n not in taken)
            taken.add(free)
            named[target] = replace(weight, name=free)
        defer_weights(program, named)
        return log.sites


def _stored(program: ExportedProgram, log: SiteLog) -> set[Node]:
    """The nodes whose values may be stored in the engine."""
    weights, stored = weight_expressions(program), set()
    for node in program.graph.nodes:
        found = value(node)
        if node not in weights or not isinstance(found, Tensor):
            continue
        if not all(isinstance(size, int) for size in found.shape):
            continue
        if is_call(node, aten.view_as_complex.default):
            continue  # what is stored is the pairs
        read = sum(value(leaf).numel() for leaf in _leaves(node))
        if found.numel() - read <= max(GROWTH, read // SHARE):
            stored.add(node)
        elif any(user not in weights for user in node.users):
            log.refused(node, "it is much larger than the weights that it is computed from")
    for node in [found for found in program.graph.nodes if _is_root(found, stored)]:
        if node.op == "call_function" and log.skipped(node):
            stored.remove(node)
    return stored


def _store_pairs(program: ExportedProgram, stored: set[Node], log: SiteLog) -> None:
    """Store complex values as pairs of real ones, which every file of weights can hold."""
    for root in [node for node in program.graph.nodes if _is_root(node, stored)]:
        if not value(root).dtype.is_complex:
            continue
        users = [user for user in root.users if user not in stored]
        with program.graph.inserting_before(min(users)):
            pairs = insert(program.graph, aten.view_as_real.default, (root,), like=root)
            whole = insert(program.graph, aten.view_as_complex.default, (pairs,), like=root)
        for user in users:
            user.replace_input_with(root, whole)
        stored.add(pairs)
        if root.op == "call_function":
            log.done(root)


def _is_root(node: Node, stored: set[Node]) -> bool:
    return node in stored and any(user not in stored for user in node.users)


def _without_data(root: Node) -> Tensor:
    """A tensor of the shape and dtype of an expression, in the memory of one element (stride 0).

    What a loop carries is a tensor of its own: torch compares its strides with those that the body
    returns.  Pairs of complex numbers lie side by side.
    """
    fake = value(root)
    for user in root.users:
        is_carried = is_structured(user) and root in operands(user)[: carried(user)]
        if is_carried or is_call(user, aten.view_as_complex.default):
            return nn.Parameter(torch.zeros(fake.shape, dtype=fake.dtype), False)
    return nn.Parameter(torch.zeros((), dtype=fake.dtype).expand(fake.shape), False)


def _in_order(root: Node) -> list[Node]:
    """Everything that an expression consists of, each once, after what it reads."""
    order: dict[Node, None] = {}

    def visit(node: Node) -> None:
        if node in order:
            return
        for source in node.all_input_nodes:
            visit(source)
        order[node] = None

    visit(root)
    return list(order)


def _leaves(root: Node) -> list[Node]:
    """The weights that an expression reads, in the order of reading."""
    return [node for node in _in_order(root) if node.op == "placeholder"]


def _expression(program: ExportedProgram, specs: Mapping[str, InputSpec], root: Node) -> Expression:
    """A copy of the nodes, so that the graph may change afterwards."""
    graph = Graph()
    copies: dict[Node, Node] = {}
    tensors: dict[Node, Tensor] = {}
    for node in _in_order(root):
        target = str(specs[node.name].target) if node.op == "placeholder" else ""
        deferred = deferred_weight(program, target)
        if deferred is not None:
            for inner in deferred.compute.nodes:
                copies[inner] = graph.node_copy(inner, copies.__getitem__)
            copies[node] = copies[inner]
            tensors |= {copies[leaf]: t for leaf, t in deferred.compute.tensors.items()}
            continue
        copies[node] = graph.node_copy(node, copies.__getitem__)
        if target:
            copies[node].target = target
            tensors[copies[node]] = weight_tensor(program, specs[node.name])
    return Expression(tuple(graph.nodes), tensors)


def _base_name(program: ExportedProgram, specs: Mapping[str, InputSpec], root: Node) -> str:
    leaves = [specs[leaf.name] for leaf in _leaves(root)]
    own = [spec for spec in leaves if spec.kind is not InputKind.CONSTANT_TENSOR]
    targets = [str(spec.target) for spec in own or leaves]  # a factor of a weight names nothing
    known = {target: deferred_weight(program, target) for target in targets}
    names = [target if found is None else found.name for target, found in known.items()]
    if len(names) == 1:
        return names[0]
    # q.weight, k.weight, v.weight of one module merge to attention.q+k+v.weight
    parts = [name.split(".") for name in names]
    if len({len(p) for p in parts}) == 1 and len({(*p[:-2], p[-1]) for p in parts}) == 1:
        joined = "+".join(p[-2] for p in parts)
        return ".".join([*parts[0][:-2], joined, parts[0][-1]])
    return names[0] + "+"
