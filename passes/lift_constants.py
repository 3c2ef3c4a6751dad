"""Take the tensors that blocks hold as attributes out of them: constants of the program, handed in.

    before:  %true_graph_0 = attribute "true_graph_0"       after:  %c: f32[8] = constant "..."
                 %c: f32[8] = attribute "_tensor_constant0"         %true_graph_0 = ...
             %cond = cond(..., [%x])                                    %c: f32[8] = input
                                                                    %cond = cond(..., [%x, %c])

torch.export does so with the constants of the outermost graph alone.
"""

from torch import Tensor
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import GraphModule, Node

from enginecast.passes.block_view import opened
from enginecast.passes.graph_edit import add_weight, free_name
from enginecast.passes.structure import blocks


def lift_constants(program: ExportedProgram) -> None:
    """Do so in every block of a program, in place."""
    for node in list(program.graph.nodes):
        for block in blocks(node):
            with opened(program, node, block) as inner:
                lift_constants(inner)
                for found in list(block.module.graph.nodes):
                    if found.op == "get_attr":
                        _lift(inner, block.module, found)


def _lift(inner: ExportedProgram, owner: GraphModule, node: Node) -> None:
    """A weight that is added to an opened block becomes one of the program around it."""
    tensor = getattr(owner, str(node.target), None)
    if not isinstance(tensor, Tensor):
        return
    name = free_name(inner, f"lifted.{node.name}")
    placeholder = add_weight(inner, name, tensor.detach(), InputKind.CONSTANT_TENSOR)
    placeholder.meta["val"] = node.meta["val"]
    node.replace_all_uses_with(placeholder)
    node.graph.erase_node(node)
