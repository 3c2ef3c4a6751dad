"""Take containers off the inputs and outputs of a program: an engine is called with tensors in
order.
"""

from collections.abc import Sequence

from torch.export import ExportedProgram
from torch.export._tree_utils import reorder_kwargs
from torch.export.exported_program import ModuleCallEntry, ModuleCallSignature
from torch.utils import _pytree as pytree


def flatten_calls(program: ExportedProgram, names: Sequence[str] | None = None) -> None:
    """Make every input an argument of its own, in the program's order, in place.

    Args:
        names: for the arguments; None: torch makes them up where the program is made a module.
    """
    args, kwargs = program.example_inputs
    # torch calls the program with keywords in the order in which forward declares them.
    declared = program.call_spec.in_spec
    assert declared is not None
    leaves = pytree.tree_leaves((args, reorder_kwargs(kwargs, declared)))
    program._example_inputs = (tuple(leaves), {})
    count = len(program.graph_signature.output_specs)
    root = program.module_call_graph[0]
    flat = ModuleCallSignature(
        inputs=[],
        outputs=[],
        in_spec=pytree.tree_structure((tuple(leaves), {})),
        out_spec=pytree.tree_structure(tuple(range(count))),
        forward_arg_names=None if names is None else [*names],
    )
    program._module_call_graph = [ModuleCallEntry(root.fqn, flat), *program.module_call_graph[1:]]
