"""Passes that break their promise."""

from dataclasses import dataclass
from typing import ClassVar

from torch.export import ExportedProgram

from enginecast.passes.ir.base import Pass, PassContext, Promise, Site
from enginecast.passes.ir.edit import aten
from enginecast.passes.ir.sites import SiteLog


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


@dataclass(frozen=True)
class WrongMerge(Pass):
    """In the place of merge-equal: adds to a value the value itself, and no bias."""

    name: ClassVar[str] = "merge-equal"
    promise: ClassVar[Promise] = "exact"

    def run(self, program: ExportedProgram, context: PassContext) -> list[Site]:
        log = SiteLog(context)
        for node in program.graph.find_nodes(op="call_function", target=aten.add.Tensor):
            if not log.skipped(node):
                node.args = (node.args[0], node.args[0])
                log.done(node)
        return log.sites
