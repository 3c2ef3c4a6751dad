"""Rewrite Fourier transforms into products with tables of sines and cosines.

    before:  %y = aten.fft_fft(%x)          after:  %r = aten.matmul(%x, %cosines)
                                                    %i = aten.matmul(%x, %sines)
                                                    %s = aten.stack([%r, %i], -1)
                                                    %y = aten.view_as_complex(%s)

`exporters/onnx/ops/fft.py` says how, and why.  Left alone are transforms of 16-bit values.
Promises `reordered`: terms are added in another order.
"""

from dataclasses import dataclass
from typing import ClassVar

from enginecast.exporters.onnx.ops.registry import rewrites
from enginecast.passes.canonicalize import fold_constants
from enginecast.passes.ir.base import GraphPass, PassContext, ProgramView, Promise, Site
from enginecast.passes.ir.rules import apply_rules
from enginecast.passes.ir.sites import SiteLog

STORED = 1 << 20
"""Elements of a table that is stored in the engine."""


@dataclass(frozen=True)
class LegalizeFourier(GraphPass):
    """Write Fourier transforms as matrix products, which every ONNX runtime computes well."""

    name: ClassVar[str] = "legalize-fourier"
    promise: ClassVar[Promise] = "reordered"

    def run(self, program: ProgramView, context: PassContext) -> list[Site]:
        before = set(program.graph.nodes)
        sites = apply_rules(program, context, *rewrites("fourier"))
        if sites:
            added = set(program.graph.nodes) - before
            fold_constants(program, SiteLog(context), among=added, largest=STORED)
        return sites
