"""Only the wanted outputs of a program, and what they need."""

import copy
from collections.abc import Mapping
from dataclasses import replace

from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind
from torch.utils import _pytree as pytree

from enginecast.passes.ir.edit import drop_unused_weights, erase_dead


def keep_outputs(program: ExportedProgram, positions: Mapping[str, int]) -> None:
    """Let `program` return some of its outputs as a dict, in place.

    Args:
        positions: name of each output that stays, in the new order, to its place among the user's
            outputs; one place may have several names.
    """
    output = program.graph.output_node()
    specs = program.graph_signature.output_specs
    user = [index for index, spec in enumerate(specs) if spec.kind is OutputKind.USER_OUTPUT]
    others = [index for index in range(len(specs)) if index not in user]
    kept = [*others, *(user[position] for position in positions.values())]
    values = output.args[0]
    assert isinstance(values, tuple | list)
    output.args = (tuple(values[index] for index in kept),)
    program.graph_signature.output_specs = [copy.deepcopy(specs[index]) for index in kept]
    entry, *modules = program.module_call_graph
    assert entry.signature is not None  # the first entry is the program itself
    signature = replace(
        entry.signature,
        outputs=[],  # torch fills it for submodules alone
        out_spec=pytree.tree_structure(dict.fromkeys(positions, 0)),
    )
    program._module_call_graph = [replace(entry, signature=signature), *modules]
    drop_dead(program)


def drop_dead(program: ExportedProgram) -> None:
    """Erase what no output needs: nodes, and weights with their tensors, in place."""
    erase_dead(program.graph)
    drop_unused_weights(program)
    program.graph_module.recompile()
    program.graph.lint()
    program.validate()


def unread_inputs(program: ExportedProgram) -> tuple[str, ...]:
    """Inputs that only outputs needed that were left out."""
    nodes = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    return tuple(
        name
        for name in program.graph_signature.user_inputs
        if name in nodes and not nodes[name].users
    )
