"""Flatten the inputs and outputs of a program: an engine takes a flat list of tensors.

    before:  program({"ids": %ids, "mask": %mask}) -> {"hidden": %h}
    after:   program(%ids, %mask) -> (%h,)

Promises `exact`: the graph stays as it is.  A call that is flat already is left as it is.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch.export import ExportedProgram
from torch.export.exported_program import ModuleCallEntry, ModuleCallSignature
from torch.utils import _pytree as pytree

from enginecast.library_names import private
from enginecast.passes.ir.base import Pass, PassContext, Promise, Site
from enginecast.passes.ir.edit import input_names
from enginecast.passes.ir.sites import SiteLog


@dataclass(frozen=True)
class FlattenCalls(Pass):
    """Make every input a named argument of its own, in the program's order."""

    name: ClassVar[str] = "flatten-calls"
    promise: ClassVar[Promise] = "exact"
    covers_blocks: ClassVar[bool] = True  # blocks take tensors in order

    def run(self, program: ExportedProgram, context: PassContext) -> list[Site]:
        log = SiteLog(context)
        output = program.graph.output_node()
        if log.skipped(output):
            return log.sites
        args, kwargs = program.example_inputs
        # torch calls the program with keywords in the order in which forward declares them.
        declared = program.call_spec.in_spec
        assert declared is not None
        reorder = private("torch.export._tree_utils.reorder_kwargs", self.name)
        leaves = tuple(pytree.tree_leaves((args, reorder(kwargs, declared))))
        program._example_inputs = (leaves, {})
        count = len(program.graph_signature.output_specs)
        root = program.module_call_graph[0]
        flat = ModuleCallSignature(
            inputs=[],
            outputs=[],
            in_spec=pytree.tree_structure((leaves, {})),
            out_spec=pytree.tree_structure(tuple(range(count))),
            forward_arg_names=input_names(program),
        )
        entry = ModuleCallEntry(root.fqn, flat)
        program._module_call_graph = [entry, *program.module_call_graph[1:]]
        log.done(output)
        return log.sites
