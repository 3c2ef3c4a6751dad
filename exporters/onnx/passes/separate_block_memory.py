"""What goes into the blocks of cond, while_loop and scan and comes out of them in ONNX: values that
share no memory.

    before:  %cond = cond(%p, %true, %false, [%x, %x])     after:  %copy = aten.clone.default(%x)
             of a block: return %x                                 %cond = cond(..., [%x, %copy])
                                                                   of a block: return aten.clone(%x)

torch.onnx refuses a block that hands back what it was given, a view of it, or one value twice (a
pass that drops an inert dropout makes such blocks), and one that is given a value twice.  Promises
`exact`: values are copied.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import Node

from enginecast.passes.ir.base import Pass, PassContext, Promise, Site
from enginecast.passes.ir.blocks import (
    Block,
    all_modules,
    blocks,
    drop_operand,
    is_structured,
    lasting_positions,
    operands,
    set_operand,
)
from enginecast.passes.ir.edit import aten, insert, value
from enginecast.passes.ir.effects import may_alias
from enginecast.passes.ir.sites import SiteLog


@dataclass(frozen=True)
class SeparateBlockMemory(Pass):
    """Copy tensors that share memory across the borders of blocks."""

    name: ClassVar[str] = "separate-block-memory"
    promise: ClassVar[Promise] = "exact"
    covers_blocks: ClassVar[bool] = True

    def run(self, program: ExportedProgram, context: PassContext) -> list[Site]:
        log = SiteLog(context)
        for module in list(all_modules(program)):
            for node in filter(is_structured, list(module.graph.nodes)):
                if log.skipped(node):
                    continue
                changed = _merge_operands(node) + _copy_operands(node)
                if changed + sum(map(_copy_results, blocks(node))):
                    log.done(node)
                else:
                    log.refused(node, "nothing shares memory across its borders")
            module.recompile()
        return log.sites


def _merge_operands(node: Node) -> int:
    """Hand a value in once; these functions return how many values they changed."""
    merged = 0
    lasting = lasting_positions(node)
    for position in reversed(lasting):
        given = operands(node)
        first = next(i for i in lasting if given[i] is given[position])
        if first != position and isinstance(given[position], Node):
            for block in blocks(node):
                block.placeholders[position].replace_all_uses_with(block.placeholders[first])
            drop_operand(node, position)
            merged += 1
    return merged


def _copy_operands(node: Node) -> int:
    given = operands(node)
    sharing = _sharing(given)
    for position in sharing:
        operand = given[position]
        with node.graph.inserting_before(node):
            set_operand(
                node, position, insert(node.graph, aten.clone.default, (operand,), like=node)
            )
    return len(sharing)


def _copy_results(block: Block) -> int:
    graph = block.module.graph
    output = graph.output_node()
    results = list(block.results)
    sharing = _sharing(results, of_block=True)
    for position in sharing:
        with graph.inserting_before(output):
            results[position] = insert(
                graph, aten.clone.default, (results[position],), like=results[position]
            )
    is_plain = not isinstance(output.args[0], tuple | list)
    output.args = (results[0] if is_plain else tuple(results),)
    return len(sharing)


def _sharing(values: Iterable[object], *, of_block: bool = False) -> list[int]:
    """Positions of the tensors that lie in the memory of an earlier one, or in that of an operand
    where they are results of a block.
    """
    owners: set[Node] = set()
    found = []
    for position, given in enumerate(values):
        if not isinstance(given, Node) or not isinstance(value(given), Tensor):
            continue
        origins = _origins(given)
        if origins & owners or (of_block and any(n.op == "placeholder" for n in origins)):
            found.append(position)
        owners |= origins
    return found


def _origins(node: Node) -> set[Node]:
    """The nodes whose memory a value may lie in."""
    found: set[Node] = set()
    waiting = [node]
    while waiting:
        current = waiting.pop()
        if is_structured(current.args[0] if current.args else None):
            found.add(current)  # one of several results, each with memory of its own
        elif current.op != "call_function" or not may_alias(current):
            found.add(current)
        else:
            waiting += current.all_input_nodes
    return found
