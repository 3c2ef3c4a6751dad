"""Dequantize embedding tables whole, and select rows from the result.

    before:  %q = aten.embedding(%w8, %ids)        after:  %w = enginecast.dequantize(%w8, %s, f16)
             %t = aten.embedding(%s, %ids)                 %r = aten.embedding(%w, %ids)
             %r = enginecast.dequantize(%q, %t, f16)

TensorRT wants scales that are constants, and has no lookup of fp8 values.  Promises `exact`: each
row is multiplied by the same scale, before it is picked and not after.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch.export import ExportedProgram
from torch.fx import Node

from enginecast.passes.ir.base import Pass, PassContext, ProgramView, Promise, Site
from enginecast.passes.ir.edit import arguments, aten, erase_dead, insert, weight_expressions
from enginecast.passes.ir.effects import own
from enginecast.passes.ir.match import is_call
from enginecast.passes.ir.rules import apply_rules


@dataclass(frozen=True)
class DequantizeTables(Pass):
    """Dequantize a table before the lookup instead of the rows after it."""

    name: ClassVar[str] = "dequantize-tables"
    promise: ClassVar[Promise] = "exact"

    def run(self, program: ExportedProgram, context: PassContext) -> list[Site]:
        weights = weight_expressions(program)
        op = own.dequantize.default
        unfit = {op: lambda node: _reads_table(node, weights)}
        sites = apply_rules(program, context, {op: _whole_table}, unfit)
        erase_dead(program.graph)
        return sites


def _reads_table(node: Node, weights: set[Node]) -> bool:
    """Whether rows of a table are dequantized, by one scale or by rows of a table of scales."""
    rows, scale = arguments(node)[:2]
    if not is_call(rows, aten.embedding.default):
        return False
    if is_call(scale, aten.embedding.default):
        return bool(scale.args[1:] == rows.args[1:])
    return scale in weights


def _whole_table(program: ProgramView, node: Node) -> Node:
    rows, scale, dtype = arguments(node)
    scales = scale.args[0] if is_call(scale, aten.embedding.default) else scale
    args = (rows.args[0], scales, dtype)
    table = insert(program.graph, own.dequantize.default, args, like=node)
    return insert(program.graph, aten.embedding.default, (table, *rows.args[1:]), like=node)
