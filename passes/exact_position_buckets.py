"""Replace relative-position buckets computed with a float logarithm by a table.

    before:  %abs = aten.abs(%distance)                      # int [tokens, key tokens]
             %log = aten.log(aten.div(aten.to(%abs, f32), 8))
             %bucket = ... aten.where(aten.lt(%abs, 8), %abs, aten.to(aten.mul(%log, ...), i64)) ...
             %bias = aten.embedding(%weight, %bucket)
    after:   %index = aten.sub(aten.clamp(%distance, -118, 118), -118)
             %bias = aten.embedding(aten.index_select(%weight, 0, %table), %index)

A bucket is an integer function of one integer, so every value it can have is known: the pass
computes it for every distance that the program's sizes allow and keeps the stretch on which it
changes.  The target's precision in the logarithm no longer matters (bf16 and TF32 move distances
such as 45 and 90 into the next bucket), and about twenty ops on [tokens, key tokens] become three.
If a bucket only selects rows of weights, they are selected when the engine is written.

Must not happen, and is refused: a bucket that depends on anything else than the distance, a
distance without known bounds, a table longer than `LONGEST`.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.export.graph_signature import InputKind
from torch.fx import Node

from enginecast.passes.analyses.ranges import interval
from enginecast.passes.ir.base import GraphPass, PassContext, ProgramView, Promise, Site
from enginecast.passes.ir.deferred_weights import Expression
from enginecast.passes.ir.edit import (
    add_weight,
    aten,
    drop_unused_weights,
    free_name,
    insert,
    same_shape,
    value,
    weight_expressions,
)
from enginecast.passes.ir.effects import is_pure
from enginecast.passes.ir.match import NoMatch, is_call, op_name, real_users
from enginecast.passes.ir.rules import rewrite_sites
from enginecast.passes.ir.traits import Trait, has

LONGEST = 1 << 16
"""Most entries of a table."""
FARTHEST = 1 << 22
"""Most distances that are evaluated."""


@dataclass(frozen=True)
class ExactPositionBuckets(GraphPass):
    """Replace logarithmic buckets of relative positions by an integer table."""

    name: ClassVar[str] = "exact-position-buckets"
    after: ClassVar[frozenset[str]] = frozenset({"unify-dtype", "canonicalize"})
    promise: ClassVar[Promise] = "exact"

    def run(self, program: ProgramView, context: PassContext) -> list[Site]:
        replaced: set[Node] = set()

        def is_log(node: Node) -> bool:
            return is_call(node, aten.log.default) and node not in replaced

        def replace(node: Node) -> str:
            return _tabulate(program, node, replaced)

        sites = rewrite_sites(program, context, is_log, replace)
        drop_unused_weights(program)
        return sites


def _tabulate(program: ProgramView, log: Node, replaced: set[Node]) -> str:
    """Replace the integer function that a logarithm is part of; add its nodes to `replaced`.

    Raises:
        NoMatch: it is not one of a single integer, or its table would be too long.
    """
    graph, distance = program.graph, _root(log)
    inside: dict[Node, None] = {}
    """What is computed from the distance alone, element by element."""
    for node in graph.nodes:
        if _is_elementwise(node) and {distance, *inside}.issuperset(node.all_input_nodes):
            inside[node] = None
    ends = [n for n in inside if any(user not in inside for user in real_users(n))]
    if len(ends) != 1:
        names = ", ".join(n.name for n in ends[:3])
        raise NoMatch(log, f"{len(ends)} values of the bucket are read elsewhere ({names})")
    [out] = ends
    needed = {out}
    for node in reversed(inside):
        if not needed.isdisjoint(node.users):
            needed.add(node)
    if log not in needed:
        raise NoMatch(log, "the logarithm does not reach the bucket")
    if not _is_integer(out):
        raise NoMatch(out, f"{op_name(out)} does not convert the logarithm to an integer")
    bounds = interval(distance)
    if bounds is None or not all(abs(bound) <= FARTHEST for bound in bounds):
        raise NoMatch(
            distance, f"nothing bounds the distance, which comes from {op_name(distance)}"
        )

    # Its values over the distances between which it changes.
    lowest, highest = map(int, bounds)
    distances = torch.arange(lowest, highest + 1, dtype=value(distance).dtype)
    computed = tuple(node for node in inside if node in needed)
    values: Tensor = Expression(computed, {distance: distances})()
    changes = (values.diff() != 0).nonzero().flatten()
    start, end = (int(changes[0]), int(changes[-1]) + 2) if len(changes) else (0, 1)
    if end - start > LONGEST:
        raise NoMatch(out, f"the table would have {end - start:,} entries")
    first, table = lowest + start, values[start:end].clone()

    replaced.update(computed)
    weights = weight_expressions(program)
    name = free_name(program, f"position_buckets.{out.name}")
    stored = add_weight(program, name, table, InputKind.CONSTANT_TENSOR)
    with graph.inserting_before(out):
        last = first + len(table) - 1
        nearest = insert(graph, aten.clamp.default, (distance, first, last), like=out)
        index = insert(graph, aten.sub.Tensor, (nearest, first), like=out)
    for user in list(out.users):
        if not is_call(user, aten.embedding.default) or user.args[0] not in weights:
            continue
        with graph.inserting_before(user):
            rows = insert(graph, aten.index_select.default, (user.args[0], 0, stored), like=user)
            bias = insert(graph, aten.embedding.default, (rows, index), like=user)
        user.replace_all_uses_with(bias)
        graph.erase_node(user)
    if real_users(out):
        with graph.inserting_before(out):
            bucket = insert(graph, aten.index.Tensor, (stored, [index]), like=out)
        out.replace_all_uses_with(bucket)
    return f"a table of {len(table)} distances from {first} on"


def _root(log: Node) -> Node:
    """The integer that a logarithm is computed from, elementwise."""
    sources: set[Node] = set()
    waiting = [log]
    while waiting:
        for source in waiting.pop().all_input_nodes:
            if _is_elementwise(source):
                waiting.append(source)
            else:
                sources.add(source)
    if len(sources) != 1:
        raise NoMatch(log, f"the logarithm is computed from {len(sources)} values, expected one")
    [root] = sources
    if not _is_integer(root):
        raise NoMatch(root, f"the logarithm is of {op_name(root)}, which is not an integer")
    return root


def _is_elementwise(node: Node) -> bool:
    """Whether each result element depends only on the arguments' elements at the same index."""
    if not has(node, Trait.ELEMENTWISE, Trait.CASTS, Trait.METADATA) or not is_pure(node):
        return False
    values = [value(each) for each in (node, *node.all_input_nodes)]
    if len(values) < 2 or not all(isinstance(each, Tensor) for each in values):
        return False
    return all(same_shape(each.shape, values[0].shape) for each in values)


def _is_integer(node: Node) -> bool:
    fake = value(node)
    return isinstance(fake, Tensor) and fake.dtype in (torch.int64, torch.int32)
