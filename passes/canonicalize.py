"""Bring a program to one plain form, so that every later pass has one spelling to match.

    before:  %drop = aten.dropout(%x, 0.1, False)          after:  (gone)
             %to = aten.to.dtype(%x: f32, f32)                     (gone)
             %a = aten.arange(%s)  %b = aten.arange(%s)            %a = aten.arange(%s)
             %m = aten.index(%mask, [%rows, %columns])             %m = aten.unsqueeze(%mask, 1)
             %n = aten.add_(%fresh, %y)                            %n = aten.add(%fresh, %y)

Exact: every output keeps every bit.  Left alone: a cast that changes the dtype, dropout in training
mode, an in-place op whose target is still read, any other op on memory that one writes into,
anything random, a copy whose strides reach an op that rounds by them.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch.export import ExportedProgram
from torch.fx import Node

from enginecast.passes.base import Pass, PassContext, Promise, Site
from enginecast.passes.common_subexpressions import merge_equal
from enginecast.passes.fold_constants import fold_constants
from enginecast.passes.graph_edit import (
    aten,
    drop_unused_weights,
    erase_dead,
    same_shape,
    shape_of,
    value,
)
from enginecast.passes.simplify import OUT_OF_PLACE, RULES
from enginecast.passes.sites import SiteLog
from enginecast.passes.strides import may_change_bits, take_strides
from enginecast.passes.written import written_values

# What may be rewritten although some op writes into the memory: these share it and copy nothing.
ON_WRITTEN = frozenset(
    {
        aten.dropout.default,
        aten.detach.default,
        aten.detach_.default,
        aten.alias.default,
        *OUT_OF_PLACE,
    }
)


@dataclass(frozen=True)
class Canonicalize(Pass):
    """Drop what changes nothing, fold constants, merge equal values."""

    name: ClassVar[str] = "canonicalize"
    # A no-op cast in an fp32 program says where the source wants fp32: unify-dtype must read it
    # before it goes.
    after: ClassVar[frozenset[str]] = frozenset({"unify-dtype"})
    promise: ClassVar[Promise] = "exact"
    in_blocks: ClassVar[bool] = True

    def run(self, program: ExportedProgram, context: PassContext) -> list[Site]:
        log = SiteLog(context)
        changed = True
        while changed:
            changed = _sweep(program, log)
        drop_unused_weights(program)
        return log.sites


def _sweep(program: ExportedProgram, log: SiteLog) -> bool:
    """Apply every rule once over the graph; whether anything changed."""
    before = len(log.sites)
    written = written_values(program.graph)
    for node in list(program.graph.nodes):
        touched = node in written or not written.isdisjoint(node.all_input_nodes)
        if node.op != "call_function" or (touched and node.target not in ON_WRITTEN):
            continue
        for rule in RULES.get(node.target, ()):
            replacement = rule(program, node)
            if replacement is None or _strides_matter(node, replacement) or log.skipped(node):
                continue
            log.done(node, rule.__name__.replace("_", " "))
            take_strides(node, value(replacement))
            node.replace_all_uses_with(replacement)
            program.graph.erase_node(node)
            break
    fold_constants(program, log)
    merge_equal(program, log)
    erase_dead(program.graph)
    return len(log.sites) > before


def _strides_matter(node: Node, replacement: Node) -> bool:
    """Whether bits may change because a replacement lies otherwise in memory."""
    if not same_shape(shape_of(node), shape_of(replacement)):
        return False  # a smaller one, which its users broadcast as they did with the other
    return may_change_bits(node, value(replacement))
