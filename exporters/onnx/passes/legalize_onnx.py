"""Rewrite a program into the forms that the ops of ONNX's readers take.

    before:  %y = aten.linear(%x, %w, %b)               after:  %t = aten.t(%w)
                                                                %m = aten.matmul(%x, %t)
                                                                %y = aten.add(%m, %b)
             %g = aten.group_norm(%x, 8, %w)                    %r = aten.reshape(%x, [n, 8, -1])
                                                                %l = aten.layer_norm(%r, ...)
                                                           (for CPUs means, one dim after the other)
             %a = enginecast.attention(%q, %k, %v, %b)          %e = aten.expand(%b, ...)
                                                                %a = enginecast.attention(..., %e)

`exporters/onnx/ops` has the forms, by torch's namespaces, and why each is needed.

Promises `reordered`: every value is computed by the same steps, but a product and its bias are
rounded one after the other now, and a group norm sums its rows in another order.
"""

from dataclasses import dataclass
from typing import ClassVar

from enginecast.exporters.onnx.ops.registry import Reader, rewrites
from enginecast.passes.ir.base import GraphPass, PassContext, ProgramView, Promise, Site
from enginecast.passes.ir.rules import apply_rules


@dataclass(frozen=True)
class LegalizeOnnx(GraphPass):
    """Replace ops that the ONNX runtime lacks, or runs badly."""

    reader: Reader = "onnxruntime-cpu"

    name: ClassVar[str] = "legalize-onnx"
    after: ClassVar[frozenset[str]] = frozenset({"legalize-quantized"})
    promise: ClassVar[Promise] = "reordered"

    def run(self, program: ProgramView, context: PassContext) -> list[Site]:
        taken_apart = apply_rules(program, context, *rewrites("complex", self.reader))
        return [*taken_apart, *apply_rules(program, context, *rewrites("plain", self.reader))]
