"""Fuse a residual add with the norm that reads it.

    before:  %h = aten.add(%residual, %branch)
             %n = aten.rms_norm(%h, [d], %w, 1e-06)
    after:   %skip = enginecast.skip_rms_norm(%branch, %residual, %w, 1e-06)
             %n = getitem(%skip, 0)
             %h = getitem(%skip, 1)

One kernel reads the stream once instead of twice.  Left alone, with the reason: a norm whose input
is not a sum (the first one of an encoder reads the embedding), a sum that broadcasts, a norm
without a weight, mixed dtypes, heads.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx import Node

from enginecast.passes.analyses.residual_stream import RANKS
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
)
from enginecast.passes.ir.match import NoMatch, behind_casts, is_call
from enginecast.passes.ir.pattern import ANYTHING, Match, Number, Pattern, Value, op, pattern
from enginecast.passes.ir.rules import rewrite_sites
from enginecast.passes.ir.text import dtype_text


@dataclass(frozen=True)
class FuseSkipNorm(GraphPass):
    """Fuse a residual add and the rms_norm that reads it."""

    name: ClassVar[str] = "fuse-skip-norm"
    after: ClassVar[frozenset[str]] = frozenset({"unify-dtype", "canonicalize", "fuse-rms-norm"})
    promise: ClassVar[Promise] = "reordered"

    def run(self, program: ProgramView, context: PassContext) -> list[Site]:
        weights = weight_expressions(program)

        def fuse(node: Node) -> str:
            match = residual_norm.match(node)
            _check_residual(match, weights)
            _fuse(program, match, weights)
            return ""

        def is_norm_of_sum(node: Node) -> bool:  # the first norm of most models reads no sum
            return is_call(node, aten.rms_norm.default) and is_call(
                behind_casts(first_input(node)), aten.add.Tensor
            )

        return rewrite_sites(program, context, is_norm_of_sum, fuse)


@pattern
def residual_norm(left: Value, right: Value, weight: Value, epsilon: Number) -> Pattern:
    """An rms_norm of a sum of two values; the site is the norm."""
    number = "the norm reads a value plus a number"
    total = left.otherwise(number) + right.otherwise(number)
    stream = total.otherwise("the norm reads {op}, expected a residual sum").where(
        lambda node: len(shape_of(node)) in RANKS,
        lambda node: f"the sum has rank {len(shape_of(node))}, expected 2 or 3",
    )
    norm = op(aten.rms_norm.default)(
        stream.named("total"),
        ANYTHING,
        weight.otherwise("the norm has no weight"),
        epsilon.otherwise("the norm leaves epsilon to the dtype"),
    )
    return norm.where(
        lambda node: len(arguments(node)[1]) == 1,
        lambda node: f"the norm is over {len(arguments(node)[1])} dims, expected the last one",
    )


def _check_residual(match: Match, weights: set[Node]) -> None:
    """Raise NoMatch if one op for sum and norm would not compute the same."""
    total, weight = match.node("total"), match.node("weight")
    if weight not in weights:
        raise NoMatch(weight, "the norm's weight is computed from inputs")
    for addend in (match.node("left"), match.node("right")):
        if not same_shape(shape_of(addend), shape_of(total)):
            raise NoMatch(addend, "an addend of the sum is broadcast")
        if dtype_of(addend) != dtype_of(weight):
            names = dtype_text(dtype_of(addend)), dtype_text(dtype_of(weight))
            raise NoMatch(addend, f"an addend is {names[0]} and the norm's weight {names[1]}")


def _fuse(program: ProgramView, match: Match, weights: set[Node]) -> None:
    graph = program.graph
    norm, total, weight = match.root, match.node("total"), match.node("weight")
    hoist_before(weight, total, weights)
    with graph.inserting_before(total):
        # The branch comes first, the residual second, as the op names them; the sum is the same
        # either way.
        args = (match.node("right"), match.node("left"), weight, match.number("epsilon"))
        pair = insert(graph, torch.ops.enginecast.skip_rms_norm.default, args, like=norm)
        normalized = insert_item(graph, pair, 0, like=norm)
        summed = insert_item(graph, pair, 1, like=total)
    norm.replace_all_uses_with(normalized)
    graph.erase_node(norm)
    total.replace_all_uses_with(summed)
    graph.erase_node(total)
