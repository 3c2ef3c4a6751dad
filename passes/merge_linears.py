"""Merge linears that read the same value into one.

    before:  %q = aten.linear(%x, %wq)        after:  %w = aten.cat([%wq, %wk, %wv])
             %k = aten.linear(%x, %wk)                %y = aten.linear(%x, %w)
             %v = aten.linear(%x, %wv)                %parts = aten.split_with_sizes(%y, [d, d, d])
                                                      %q = getitem(%parts, 0) ...

The merged weight is an expression: the exporter computes it while it writes it, so no second copy
of the weights is held. Good on a GPU (one large product); on ONNX Runtime's CPU provider the split
costs 3 to 6 % and eats the gain, so the CPU presets leave it out.  Left alone, with the reason:
weights that are read elsewhere as well or stay in fp8 as they were given, mixed dtypes, biases on
some of the linears only, weights of rank 1 and biases that are broadcast.

Linears of one value may be those of all blocks (a time step's modulations): they are merged in
groups, none with a weight of more than `LARGEST` elements, since who writes or runs it holds it.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import ClassVar

from torch.export.graph_signature import InputSpec
from torch.fx import Node

from enginecast.passes.ir.base import GraphPass, PassContext, ProgramView, Promise, Site
from enginecast.passes.ir.edit import (
    arguments,
    aten,
    dtype_of,
    first_input,
    hoist_before,
    insert,
    insert_item,
    same_shape,
    shape_of,
    weight_expressions,
    weight_specs,
)
from enginecast.passes.ir.match import NoMatch, behind_casts, is_call
from enginecast.passes.ir.sites import SiteLog

LARGEST = 1 << 27
"""Elements of a merged weight: four times those of q, k and v of the largest Flux.  A product with
more takes no less time in one."""


@dataclass(frozen=True)
class MergeLinears(GraphPass):
    """Merge linears of one input (q, k, v; wi_0, wi_1) into one."""

    name: ClassVar[str] = "merge-linears"
    after: ClassVar[frozenset[str]] = frozenset({"unify-dtype", "canonicalize"})
    promise: ClassVar[Promise] = "reordered"

    def run(self, program: ProgramView, context: PassContext) -> list[Site]:
        log = SiteLog(context)
        weights, specs = weight_expressions(program), weight_specs(program)
        groups: dict[Node, list[Node]] = defaultdict(list)
        for node in program.graph.nodes:
            if is_call(node, aten.linear.default) and node.args[1] in weights:
                groups[first_input(node)].append(node)
        for group in [g for g in groups.values() if len(g) > 1]:
            for part in _parts(group):
                chosen = [node for node in part if not log.skipped(node)]
                if not chosen:
                    continue
                try:
                    _check(chosen, weights, context.given, specs)
                except NoMatch as miss:
                    for node in chosen:
                        log.refused(node, miss.reason)
                    continue
                names = ", ".join(node.name for node in chosen)
                _merge(program, chosen, weights)
                for node in chosen:
                    log.done(node, f"merged: {names}")
        return log.sites


def _parts(group: list[Node]) -> list[list[Node]]:
    """The linears in order, in parts whose weights together are not too large to be merged."""
    parts: list[list[Node]] = [[]]
    elements = 0
    for node in group:
        size = math.prod(shape_of(arguments(node)[1]))
        if elements + size > LARGEST and parts[-1]:
            parts.append([])
            elements = 0
        parts[-1].append(node)
        elements += size
    return parts


def _check(
    group: list[Node], weights: set[Node], given: Set[str], specs: Mapping[str, InputSpec]
) -> None:
    if len(group) < 2:
        raise NoMatch(group[0], "no other linear that reads the same value can join it")
    with_bias = [len(node.args) > 2 and node.args[2] is not None for node in group]
    if len(set(with_bias)) > 1:
        raise NoMatch(group[0], "some of the linears have a bias and some do not")
    for node in group:
        _, weight, *rest = arguments(node)
        bias = rest[0] if rest else None
        if dtype_of(weight) != dtype_of(group[0].args[1]):
            raise NoMatch(node, "the weights have different dtypes: run unify-dtype first")
        stored = behind_casts(weight)
        if given and stored.op == "placeholder" and specs[stored.name].target in given:
            raise NoMatch(node, "its weight stays in fp8 with the scale of the checkpoint")
        shared = _shared(weight)
        if shared is not None:
            raise NoMatch(node, f"{shared.name} is read elsewhere as well")
        if len(shape_of(weight)) != 2:
            raise NoMatch(node, f"a weight has rank {len(shape_of(weight))}, expected 2")
        if isinstance(bias, Node) and bias not in weights:
            raise NoMatch(bias, "a bias is computed from inputs")
        if isinstance(bias, Node) and not same_shape(shape_of(bias), shape_of(weight)[:1]):
            raise NoMatch(bias, "a bias is broadcast over the features")


def _shared(weight: Node) -> Node | None:
    """The part of a weight expression that something else reads, too: merging would copy it."""
    if len(weight.users) > 1:
        return weight
    return next((found for s in weight.all_input_nodes if (found := _shared(s))), None)


def _merge(program: ProgramView, group: list[Node], weights: set[Node]) -> None:
    graph, first = program.graph, group[0]
    for node in group:
        for source in node.args[1:]:
            if isinstance(source, Node):
                hoist_before(source, first, weights)
    sizes = [shape_of(node)[-1] for node in group]
    with graph.inserting_before(first):
        weight = insert(graph, aten.cat.default, ([n.args[1] for n in group],), like=first)
        args = [first_input(first), weight]
        if len(first.args) > 2 and first.args[2] is not None:
            biases = [node.args[2] for node in group]
            args.append(insert(graph, aten.cat.default, (biases,), like=first))
        merged = insert(graph, aten.linear.default, tuple(args), like=first)
        parts = insert(graph, aten.split_with_sizes.default, (merged, sizes, -1), like=first)
        for index, node in enumerate(group):
            for view in [user for user in node.users if is_call(user, aten.view.default)]:
                view.target = aten.reshape.default  # a part is not contiguous
            node.replace_all_uses_with(insert_item(graph, parts, index, like=node))
    for node in group:
        graph.erase_node(node)
