"""Constants within blocks become constants of the program, which passes and exporters know.

    before:  cond(%x, block_0, block_1), and block_0 has get_attr[lifted_tensor_0]
    after:   cond(%x, block_0, block_1, %lifted), and block_0 takes it as an input

Nodes within blocks get the module of the op that runs them, too: torch.export names none. An op
that runs a graph in a way that is not known here, such as map, is refused.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor
from torch._ops import HigherOrderOperator
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import GraphModule

from enginecast.errors import CaptureError
from enginecast.passes.ir.base import Pass, PassContext, ProgramView, Site
from enginecast.passes.ir.block_view import opened
from enginecast.passes.ir.blocks import all_blocks, all_nodes, blocks, is_structured
from enginecast.passes.ir.edit import add_weight, free_name
from enginecast.passes.ir.sites import SiteLog
from enginecast.passes.ir.source import source_line


@dataclass(frozen=True)
class LiftConstants(Pass):
    """Let the program hand in the constants of its blocks; refuse a structured op that is not
    known.
    """

    name: ClassVar[str] = "lift-constants"
    covers_blocks: ClassVar[bool] = True

    def requires(self, program: ExportedProgram) -> None:
        for node in all_nodes(program):
            if not isinstance(node.target, HigherOrderOperator) or is_structured(node):
                continue
            owner: Any = node.graph.owning_module
            held = (n for n in node.all_input_nodes if n.op == "get_attr")
            runs = any(isinstance(getattr(owner, str(n.target), None), GraphModule) for n in held)
            # A wrapper runs its graph once, as it is: interpreting the op is right.
            if runs and not node.target.name().startswith("wrap"):
                place = source_line(node) or node.name
                raise CaptureError(
                    f"{node.target} at {place} is a structured operator that engines do not"
                    " support",
                    hint="Use cond, while_loop or scan instead.",
                )

    def run(self, program: ExportedProgram, context: PassContext) -> list[Site]:
        log = SiteLog(context)
        _lift(program, log)
        for node, block in all_blocks(program):
            for inner in block.module.graph.nodes:
                for key in ("nn_module_stack", "stack_trace"):
                    if inner.op == "call_function" and node.meta.get(key):
                        inner.meta[key] = inner.meta.get(key) or node.meta[key]
        return log.sites


def _lift(program: ProgramView, log: SiteLog) -> None:
    for node in list(program.graph.nodes):
        for block in blocks(node):
            with opened(program, node, block) as inner:
                _lift(inner, log)
                for found in block.module.graph.find_nodes(op="get_attr"):
                    tensor = getattr(block.module, str(found.target), None)
                    if not isinstance(tensor, Tensor):
                        continue
                    log.done(found)
                    # A weight of the opened block becomes one of the program around it.
                    name = free_name(inner, f"lifted.{found.name}")
                    kind = InputKind.CONSTANT_TENSOR
                    placeholder = add_weight(inner, name, tensor.detach(), kind)
                    placeholder.meta["val"] = found.meta["val"]
                    found.replace_all_uses_with(placeholder)
                    found.graph.erase_node(found)
