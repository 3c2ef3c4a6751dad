"""Fuse a residual add with the norm that reads it.

    before:  %h = aten.add(%residual, %branch)
             %n = aten.rms_norm(%h, [d], %w, 1e-06)
    after:   %skip = enginecast.skip_rms_norm(%branch, %residual, %w, 1e-06)
             %n = getitem(%skip, 0)
             %h = getitem(%skip, 1)

One kernel reads the stream once instead of twice.  Left alone, with the reason: a norm whose input
is no sum (the first one of an encoder reads the embedding), a sum that broadcasts, a norm without a
weight, mixed dtypes, heads.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.export import ExportedProgram
from torch.fx import Node

import enginecast.ops  # noqa: F401 - registers enginecast::skip_rms_norm
from enginecast.passes.base import Pass, PassContext, Promise, Site
from enginecast.passes.graph_edit import (
    arguments,
    aten,
    dtype_of,
    erase_dead,
    first_input,
    hoist_before,
    insert,
    insert_item,
    same_shape,
    shape_of,
    weight_expressions,
)
from enginecast.passes.ir_text import dtype_text
from enginecast.passes.match import NoMatch, is_call, op_name
from enginecast.passes.sites import SiteLog

RANKS = (2, 3)
"""Of a residual stream, and what the op takes; a rotated query that is normalised has 4."""


@dataclass(frozen=True)
class FuseSkipNorm(Pass):
    """Fuse a residual add and the rms_norm that reads it."""

    name: ClassVar[str] = "fuse-skip-norm"
    after: ClassVar[frozenset[str]] = frozenset({"unify-dtype", "canonicalize", "fuse-rms-norm"})
    promise: ClassVar[Promise] = "reordered"
    in_blocks: ClassVar[bool] = True

    def run(self, program: ExportedProgram, context: PassContext) -> list[Site]:
        log = SiteLog(context)
        weights = weight_expressions(program)
        for node in list(program.graph.nodes):
            if not is_call(node, aten.rms_norm.default) or log.skipped(node):
                continue
            try:
                _fuse(program, node, *match_residual(node, weights), weights)
            except NoMatch as miss:
                log.refused(node, miss.reason)
                continue
            log.done(node)
        erase_dead(program.graph)
        return log.sites


def match_residual(norm: Node, weights: set[Node]) -> tuple[Node, Node, Node]:
    """The sum that a norm reads and its two addends.

    Args:
        norm: an rms_norm.
        weights: every weight expression of the program.

    Raises:
        NoMatch: with the reason why the norm does not read a residual sum.
    """
    total = first_input(norm)
    weight = _plain_weight(norm, weights)
    if not is_call(total, aten.add.Tensor) or total.kwargs.get("alpha", 1) != 1:
        raise NoMatch(total, f"the norm reads {op_name(total)}, expected a residual sum")
    if len(shape_of(total)) not in RANKS:
        raise NoMatch(total, f"the sum has rank {len(shape_of(total))}, expected 2 or 3")
    left, right = total.args[:2]
    if not (isinstance(left, Node) and isinstance(right, Node)):
        raise NoMatch(total, "the norm reads a value plus a number")
    for addend in (left, right):
        if not same_shape(shape_of(addend), shape_of(total)):
            raise NoMatch(addend, "an addend of the sum is broadcast")
        if dtype_of(addend) != dtype_of(weight):
            found, wanted = dtype_text(dtype_of(addend)), dtype_text(dtype_of(weight))
            raise NoMatch(addend, f"an addend is {found} and the norm's weight {wanted}")
    return total, left, right


def _plain_weight(norm: Node, weights: set[Node]) -> Node:
    """The weight of a norm over the last dim, with its own epsilon."""
    _, sizes, weight, epsilon = (*arguments(norm), None, None)[:4]
    if not isinstance(weight, Node):
        raise NoMatch(norm, "the norm has no weight")
    if len(sizes) != 1:
        raise NoMatch(norm, f"the norm is over {len(sizes)} dims, expected the last one")
    if epsilon is None:
        raise NoMatch(norm, "the norm leaves epsilon to the dtype")
    if weight not in weights:
        raise NoMatch(weight, "the norm's weight is computed from inputs")
    return weight


def _fuse(
    program: ExportedProgram, norm: Node, total: Node, left: Node, right: Node, weights: set[Node]
) -> None:
    graph = program.graph
    _, _, weight, epsilon = norm.args[:4]
    assert isinstance(weight, Node)
    hoist_before(weight, total, weights)
    with graph.inserting_before(total):
        # The branch comes first, the residual second, as the op names them; the sum is the same
        # either way.
        pair = insert(
            graph,
            torch.ops.enginecast.skip_rms_norm.default,
            (right, left, weight, epsilon),
            like=norm,
        )
        normalised = insert_item(graph, pair, 0, like=norm)
        summed = insert_item(graph, pair, 1, like=total)
    norm.replace_all_uses_with(normalised)
    graph.erase_node(norm)
    total.replace_all_uses_with(summed)
    graph.erase_node(total)
