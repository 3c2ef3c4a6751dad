"""What a captured program's blocks need before passes see them: a place in the source, to be of a
kind that is known, and constants that are the program's.
"""

from typing import Any

from torch import Tensor
from torch._ops import HigherOrderOperator
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import GraphModule, Node

from enginecast.passes.ir.base import ProgramView
from enginecast.passes.ir.block_view import opened
from enginecast.passes.ir.blocks import all_nodes, blocks, is_structured
from enginecast.passes.ir.edit import add_weight, free_name


def name_places(program: ExportedProgram) -> None:
    """Give nodes within blocks the module of the op that runs them: torch.export names none."""
    _name_places(program.graph_module)


def _name_places(module: GraphModule) -> None:
    for node in module.graph.nodes:
        for block in blocks(node):
            for inner in block.module.graph.nodes:
                for key in ("nn_module_stack", "stack_trace"):
                    if inner.op == "call_function" and node.meta.get(key):
                        inner.meta[key] = inner.meta.get(key) or node.meta[key]
            _name_places(block.module)


def unknown_structure(program: ExportedProgram) -> Node | None:
    """The first op that runs a graph in a way that is not known here, such as map."""
    for node in all_nodes(program):
        if not isinstance(node.target, HigherOrderOperator) or is_structured(node):
            continue
        owner: Any = node.graph.owning_module
        held = (n for n in node.all_input_nodes if n.op == "get_attr")
        runs = any(isinstance(getattr(owner, str(n.target), None), GraphModule) for n in held)
        # A wrapper runs its graph once, as it is: interpreting the op is right.
        if runs and not node.target.name().startswith("wrap"):
            return node
    return None


def lift_constants(program: ProgramView) -> None:
    """Do so in every block of a program, in place."""
    for node in list(program.graph.nodes):
        for block in blocks(node):
            with opened(program, node, block) as inner:
                lift_constants(inner)
                for found in list(block.module.graph.nodes):
                    if found.op == "get_attr":
                        _lift(inner, block.module, found)


def _lift(inner: ProgramView, owner: GraphModule, node: Node) -> None:
    """A weight that is added to an opened block becomes one of the program around it."""
    tensor = getattr(owner, str(node.target), None)
    if not isinstance(tensor, Tensor):
        return
    name = free_name(inner, f"lifted.{node.name}")
    placeholder = add_weight(inner, name, tensor.detach(), InputKind.CONSTANT_TENSOR)
    placeholder.meta["val"] = node.meta["val"]
    node.replace_all_uses_with(placeholder)
    node.graph.erase_node(node)
