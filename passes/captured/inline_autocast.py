"""Regions of `torch.autocast`, which torch.export captures as subgraphs.

    before:  %mul = wrap_with_autocast(cpu, bfloat16, False, False, %submod_1, %x)
    after:   what submod_1 holds

A region that casts nothing, as one that switches autocast off, becomes a part of the graph around
it.  A trace has no others (`capture.python.autocast`); a program that was given may, which compute
in 16 bits whatever precision is asked for.  They are refused.
"""

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from enginecast.errors import CaptureError
from enginecast.library_names import higher_order
from enginecast.passes.ir.base import CapturePass, PassContext, Site
from enginecast.passes.ir.edit import arguments, value
from enginecast.passes.ir.sites import SiteLog
from enginecast.passes.ir.source import source_line

AUTOCAST = higher_order("wrap_with_autocast")
HALVES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class InlineAutocast(CapturePass):
    """Inline autocast regions into the graphs around them; refuse regions that cast."""

    name: ClassVar[str] = "inline-autocast"

    def run(self, program: ExportedProgram, context: PassContext) -> list[Site]:
        log = SiteLog(context)
        for region, module in list(regions(program)):
            log.done(region)
            _inline(region, module)
            module.recompile()
        return log.sites


def regions(program: ExportedProgram) -> Iterator[tuple[Node, GraphModule]]:
    """Each region, and the module that runs it, from the inside out."""
    for module in reversed(list(program.graph_module.modules())):
        if isinstance(module, GraphModule):
            for region in module.graph.find_nodes(op="call_function", target=AUTOCAST):
                yield region, module


def _inline(region: Node, module: GraphModule) -> None:
    _, dtype, enabled, _, block, *operands = region.args
    graph = region.graph
    assert isinstance(block, Node)
    held = module.get_submodule(str(block.target))
    assert isinstance(held, GraphModule)
    inner = held.graph
    placeholders = inner.find_nodes(op="placeholder")
    known = dict(zip(placeholders, operands, strict=True))
    with graph.inserting_before(region):
        for node in inner.nodes:
            if enabled and _is_half(node):
                line = source_line(node)
                raise CaptureError(
                    f"forward computes in {str(dtype).removeprefix('torch.')} within"
                    f" torch.autocast{f' at {line}' if line else ''}, whatever the precision of the"
                    " engine",
                    hint="Leave autocast out of forward, and give --precision fp16 or bf16.",
                )
            if node.op in ("placeholder", "output"):
                continue
            known[node] = graph.node_copy(node, known.__getitem__)
            if node.op == "get_attr":  # a block of a branch or loop within the region
                name = f"{block.target}_{node.target}"
                module.add_submodule(name, held.get_submodule(node.target))
                known[node].target = name
    [results] = arguments(inner.output_node())
    for user in list(region.users):
        assert user.target is operator.getitem
        user.replace_all_uses_with(known[results[arguments(user)[1]]])
        graph.erase_node(user)
    graph.erase_node(region)
    if not block.users:
        graph.erase_node(block)


def _is_half(node: Node) -> bool:
    found = pytree.tree_leaves(value(node))
    return any(isinstance(each, Tensor) and each.dtype in HALVES for each in found)
