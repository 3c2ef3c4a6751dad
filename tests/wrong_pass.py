"""A pass that breaks its promise: it changes a constant."""

from dataclasses import dataclass
from typing import ClassVar

from torch.export import ExportedProgram

from enginecast.passes.base import Pass, PassContext, Promise, Site


@dataclass(frozen=True)
class Perturb(Pass):
    """Add a little to a constant and call the result equal."""

    name: ClassVar[str] = "perturb"
    promise: ClassVar[Promise] = "exact"

    def run(self, program: ExportedProgram, context: PassContext) -> list[Site]:
        sites = []
        for node in program.graph.nodes:
            if node.op == "call_function" and 0.5 in node.args:
                node.args = tuple(0.501 if arg == 0.5 else arg for arg in node.args)
                sites.append(Site(node.name, "", "wrong_pass.py:1"))
        return sites
