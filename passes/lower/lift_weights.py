"""Move weight expressions out of blocks, where they would be computed each time the block runs.

    before:  %true_graph_0 = attribute "true_graph_0"      after:  %w_f16 = aten.to.dtype(%w, f16)
                 %w: f32[8, 8] = input                             %true_graph_0 = ...
                 %w_f16 = aten.to.dtype(%w, f16)                       %w_f16: f16[8, 8] = input
             %cond = cond(..., [%w])                               %cond = cond(..., [%w_f16])

Outside they are weight expressions like any other: stored when the engine is written.  Promises
`exact`: the same values, computed once.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch.export import ExportedProgram
from torch.fx import Node

from enginecast.passes.ir.base import Pass, PassContext, ProgramView, Promise, Site
from enginecast.passes.ir.block_view import BlockView
from enginecast.passes.ir.blocks import (
    Block,
    add_operand,
    blocks,
    drop_operand,
    lasting_positions,
    operands,
)
from enginecast.passes.ir.edit import weight_expressions
from enginecast.passes.ir.sites import SiteLog


@dataclass(frozen=True)
class LiftWeights(Pass):
    """Move weight expressions out of blocks, and drop operands that no block reads."""

    name: ClassVar[str] = "lift-weights"
    promise: ClassVar[Promise] = "exact"
    covers_blocks: ClassVar[bool] = True

    def run(self, program: ExportedProgram, context: PassContext) -> list[Site]:
        log = SiteLog(context)
        lift_weights(program, log)
        return log.sites


def lift_weights(program: ProgramView, log: SiteLog) -> None:
    """Move every weight expression out of the blocks of a program, in place."""
    for node in list(program.graph.nodes):
        for block in blocks(node):
            lift_weights(BlockView(program, node, block), log)  # from the innermost outwards
            # What came out of a block within this one is not an operand of it yet.
            _lift(program, node, block, log)
            block.module.recompile()
        for position in sorted(lasting_positions(node), reverse=True) if blocks(node) else ():
            if not any(block.placeholders[position].users for block in blocks(node)):
                drop_operand(node, position)


def _lift(program: ProgramView, node: Node, block: Block, log: SiteLog) -> None:
    weights = weight_expressions(BlockView(program, node, block))
    outside = dict(zip(block.placeholders, operands(node), strict=True))
    roots = [
        inner
        for inner in block.module.graph.nodes
        if inner in weights
        and inner.op == "call_function"
        and any(user not in weights for user in inner.users)
    ]
    for root in roots:
        if log.skipped(root):
            continue
        moved = _copy_out(program, node, root, outside)
        inside = add_operand(node, moved)[block.path]
        outside[inside] = moved
        log.done(root)
        for user in list(root.users):
            if user not in weights:
                user.replace_input_with(root, inside)
    for inner in reversed(block.module.graph.nodes):
        if inner in weights and inner.op == "call_function" and not inner.users:
            block.module.graph.erase_node(inner)


def _copy_out(program: ProgramView, node: Node, root: Node, outside: dict[Node, Node]) -> Node:
    """Copy an expression to right before `node`; `outside` knows what was copied already."""
    if root in outside:
        return outside[root]
    for source in root.all_input_nodes:
        _copy_out(program, node, source, outside)
    with program.graph.inserting_before(node):
        moved: Node = program.graph.node_copy(root, outside.__getitem__)
    first = root.all_input_nodes[0]
    if root.name.startswith(first.name):  # "arg0_1_f16" is "p_weight_f16" outside
        moved._rename(outside[first].name + root.name.removeprefix(first.name))
    outside[root] = moved
    return moved
