"""Only the wanted outputs of a program, and what they need."""

import copy
from dataclasses import dataclass, replace
from typing import ClassVar

from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind
from torch.utils import _pytree as pytree

from enginecast.passes.ir.base import CapturePass, PassContext, Site
from enginecast.passes.ir.edit import drop_unused_weights, erase_dead
from enginecast.passes.ir.sites import SiteLog


@dataclass(frozen=True)
class KeepOutputs(CapturePass):
    """Return only the requested outputs, as a dict, and erase nodes and weights that none needs."""

    name: ClassVar[str] = "keep-outputs"

    names: tuple[str, ...] = ()
    """Of the outputs that stay, in their new order; none: the outputs are as they were."""
    places: tuple[int, ...] = ()
    """Of each among the outputs that there are; one output may have several names."""

    def run(self, program: ExportedProgram, context: PassContext) -> list[Site]:
        log, before = SiteLog(context), list(program.graph.nodes)
        if self.names:
            self._cut(program)
        erase_dead(program.graph)
        drop_unused_weights(program)
        left = set(program.graph.nodes)
        for node in before:
            if node not in left:
                log.done(node)
        return log.sites

    def _cut(self, program: ExportedProgram) -> None:
        output = program.graph.output_node()
        specs = program.graph_signature.output_specs
        user = [index for index, spec in enumerate(specs) if spec.kind is OutputKind.USER_OUTPUT]
        others = [index for index in range(len(specs)) if index not in user]
        kept = [*others, *(user[place] for place in self.places)]
        values = output.args[0]
        assert isinstance(values, tuple | list)
        output.args = (tuple(values[index] for index in kept),)
        program.graph_signature.output_specs = [copy.deepcopy(specs[index]) for index in kept]
        entry, *modules = program.module_call_graph
        assert entry.signature is not None  # the first entry is the program itself
        signature = replace(
            entry.signature,
            outputs=[],  # torch fills it for submodules alone
            out_spec=pytree.tree_structure(dict.fromkeys(self.names, 0)),
        )
        program._module_call_graph = [replace(entry, signature=signature), *modules]
