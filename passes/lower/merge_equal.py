"""Merge nodes that compute the same value, such as the transposes of a weight that two layers read.

    before:  %t = aten.t.default(%w)      after:  %t = aten.t.default(%w)
             %t_1 = aten.t.default(%w)

Promises `exact`.  Left alone is what some op still writes into, and what reads that.
"""

from dataclasses import dataclass
from typing import ClassVar

from enginecast.passes.ir.base import GraphPass, PassContext, ProgramView, Promise, Site
from enginecast.passes.ir.common_subexpressions import merge_equal
from enginecast.passes.ir.sites import SiteLog


@dataclass(frozen=True)
class MergeEqual(GraphPass):
    """Compute equal values once."""

    name: ClassVar[str] = "merge-equal"
    promise: ClassVar[Promise] = "exact"

    def run(self, program: ProgramView, context: PassContext) -> list[Site]:
        log = SiteLog(context)
        merge_equal(program, log)
        return log.sites
