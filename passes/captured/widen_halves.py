"""Values that a model in fp32 computes in 16 bits by itself become fp32, rounded likewise."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from enginecast.passes.ir.base import Pass, PassContext, Promise, Site
from enginecast.passes.ir.sites import SiteLog
from enginecast.passes.ir.text import dtype_text
from enginecast.passes.unify_dtype import UnifyDtype, in_halves


@dataclass(frozen=True)
class WidenHalves(Pass):
    """Compute the model's own 16-bit values in fp32, and round where it does."""

    name: ClassVar[str] = "widen-halves"
    after: ClassVar[frozenset[str]] = frozenset({"bind-weights", "functionalize"})
    promise: ClassVar[Promise] = "precision"
    covers_blocks: ClassVar[bool] = True

    def run(self, program: ExportedProgram, context: PassContext) -> list[Site]:
        log = SiteLog(context)
        for node, dtype in in_halves(program, is_whole=False).items():
            log.done(node, dtype_text(dtype))
        _KeepHalves().run(program, context)
        return log.sites


class _KeepHalves(UnifyDtype):
    """For a model whose weights may have several dtypes of their own."""

    def halves(self, program: ExportedProgram) -> dict[Node, torch.dtype]:
        return in_halves(program, is_whole=False)
