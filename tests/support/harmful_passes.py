"""Passes that do harm on purpose, at the sites that their options name."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from enginecast.passes.fuse_rms_norm import FuseRmsNorm
from enginecast.passes.ir.base import Pass, PassContext, ProgramView, Promise, Site
from enginecast.passes.ir.edit import aten, insert
from enginecast.passes.ir.sites import SiteLog
from enginecast.passes.ir.source import module_path


def scale(node: Node, factor: float) -> None:
    """Multiply what a node gives."""
    with node.graph.inserting_after(node):
        scaled = insert(node.graph, aten.mul.Tensor, (node, factor), like=node)
    node.replace_all_uses_with(scaled, delete_user_cb=lambda user: user is not scaled)


@dataclass(frozen=True)
class TouchLinears(Pass):
    """Every linear is a site; those whose module ends in one of `wrong` come out too large.

    "A+B" in `wrong` does harm at B, and only when a linear of A is rewritten too.
    """

    name: ClassVar[str] = "touch-linears"
    promise: ClassVar[Promise] = "reordered"

    wrong: tuple[str, ...] = ()
    by: float = 1e-3

    def run(self, program: ExportedProgram, context: PassContext) -> list[Site]:
        log = SiteLog(context)
        touched = []
        for node in list(program.graph.nodes):
            if node.target is aten.linear.default and not log.skipped(node):
                touched.append(node)
                log.done(node)
        for ends in (wrong.split("+") for wrong in self.wrong):
            found = [[n for n in touched if module_path(n).endswith(end)] for end in ends]
            if all(found):
                for node in found[-1]:
                    scale(node, 1 + self.by)
        return log.sites


@dataclass(frozen=True)
class TouchExactly(TouchLinears):
    """The same, and it promises more."""

    name: ClassVar[str] = "touch-exactly"
    promise: ClassVar[Promise] = "exact"


@dataclass(frozen=True)
class Stubborn(TouchLinears):
    """Does not listen to what it is asked to leave alone."""

    name: ClassVar[str] = "stubborn"

    def run(self, program: ExportedProgram, context: PassContext) -> list[Site]:
        return super().run(program, PassContext())


@dataclass(frozen=True)
class Elsewhere(TouchLinears):
    """Does its harm outside of its sites."""

    name: ClassVar[str] = "elsewhere"

    def run(self, program: ExportedProgram, context: PassContext) -> list[Site]:
        sites = super().run(program, context)
        last = [n for n in program.graph.nodes if n.target is aten.linear.default][-1]
        scale(last, 1 + self.by)
        return sites


@dataclass(frozen=True)
class Brittle(TouchLinears):
    """Fails when more than `spare` of its sites are left alone."""

    name: ClassVar[str] = "brittle"

    spare: int = 0

    def run(self, program: ExportedProgram, context: PassContext) -> list[Site]:
        sites = super().run(program, context)
        if sum(not site.rewritten for site in sites) > self.spare:
            raise RuntimeError("too few linears are left")
        return sites


@dataclass(frozen=True)
class Dependent(Pass):
    """Runs only on a program in which a linear was made too large."""

    name: ClassVar[str] = "dependent"

    def run(self, program: ExportedProgram, context: PassContext) -> list[Site]:
        if not any(1 + TouchLinears.by in node.args for node in program.graph.nodes):
            raise RuntimeError("no linear is too large")
        return []


@dataclass(frozen=True)
class FuseWrongly(FuseRmsNorm):
    """Fuses norms, those of one module with another epsilon."""

    name: ClassVar[str] = "fuse-wrongly"

    wrong: str = "block.1.layer.1.layer_norm"

    def run(self, program: ProgramView, context: PassContext) -> list[Site]:
        sites = super().run(program, context)
        for node in program.graph.nodes:
            if node.target is aten.rms_norm.default and module_path(node).endswith(self.wrong):
                node.args = (*node.args[:3], 0.5)
        return sites


@dataclass(frozen=True)
class Drift(Pass):
    """What every layer adds to the residual is a site, and grows by a few roundings."""

    name: ClassVar[str] = "drift"
    promise: ClassVar[Promise] = "reordered"

    by: float = 4e-7
    modules: tuple[str, ...] = ("o", "wo")

    def run(self, program: ExportedProgram, context: PassContext) -> list[Site]:
        log = SiteLog(context)
        for node in list(program.graph.nodes):
            ends_layer = module_path(node).rpartition(".")[2] in self.modules
            if node.target is aten.linear.default and ends_layer and not log.skipped(node):
                # x + by * x rounds once: 1 + by would itself be rounded to whole steps.
                with node.graph.inserting_after(node):
                    more = insert(
                        node.graph, aten.add.Tensor, (node, node), {"alpha": self.by}, like=node
                    )
                node.replace_all_uses_with(more, delete_user_cb=lambda u, more=more: u is not more)
                log.done(node)
        return log.sites


@dataclass(frozen=True)
class Siteless(Pass):
    """Changes every linear of the last layer and tells of no site."""

    name: ClassVar[str] = "siteless"
    promise: ClassVar[Promise] = "reordered"

    def run(self, program: ExportedProgram, context: PassContext) -> list[Site]:
        linears = [n for n in program.graph.nodes if n.target is aten.linear.default]
        scale(linears[-1], 1.01)
        return []


@dataclass(frozen=True)
class ShrinkRange(Pass):
    """Computes one module's linears in the rounding of bfloat16: a pass of precision."""

    name: ClassVar[str] = "shrink-range"
    promise: ClassVar[Promise] = "precision"

    module: str = "wo"

    def run(self, program: ExportedProgram, context: PassContext) -> list[Site]:
        log = SiteLog(context)
        for node in list(program.graph.nodes):
            if node.target is aten.linear.default and module_path(node).endswith(self.module):
                with node.graph.inserting_after(node):
                    low = insert(node.graph, aten.to.dtype, (node, torch.bfloat16), like=node)
                with node.graph.inserting_after(low):
                    back = insert(node.graph, aten.to.dtype, (low, torch.float32), like=node)
                node.replace_all_uses_with(back, delete_user_cb=lambda u, low=low: u is not low)
                log.done(node)
        return log.sites


NAMES = {
    found.name: f"harmful_passes:{found.__name__}"
    for found in (
        *(TouchLinears, TouchExactly, Stubborn, Elsewhere, Brittle, Dependent),
        *(FuseWrongly, Drift, Siteless, ShrinkRange),
    )
}
