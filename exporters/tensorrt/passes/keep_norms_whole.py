"""Give norms a name that torch_tensorrt does not know, so that our converter gets them whole.

    before:  %n = aten.rms_norm(%x, [d], %w, 1e-6)
    after:   %n = enginecast.whole_rms_norm(%x, 1, %w, 1e-6)

torch_tensorrt takes `aten.rms_norm` apart, and what torch makes of it on a GPU into products in the
dtype of its input (dynamo/lowering/passes/replace_fused_rms_norm.py), where the square of 256 is
infinite in fp16.  Promises `reordered`: the product with the weight is computed in fp32 too.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx import Node

from enginecast.passes.ir.base import GraphPass, PassContext, ProgramView, Promise, Site
from enginecast.passes.ir.edit import arguments, aten, insert
from enginecast.passes.ir.effects import own
from enginecast.passes.ir.rules import apply_rules


@dataclass(frozen=True)
class KeepNormsWhole(GraphPass):
    """Keep each RMS norm one op until torch_tensorrt converts it."""

    name: ClassVar[str] = "keep-norms-whole"
    after: ClassVar[frozenset[str]] = frozenset({"decompose-fused"})
    promise: ClassVar[Promise] = "reordered"

    def run(self, program: ProgramView, context: PassContext) -> list[Site]:
        return apply_rules(program, context, {aten.rms_norm.default: _whole_norm})


def _whole_norm(program: ProgramView, node: Node) -> Node:
    x, size, weight, epsilon = (*arguments(node), None, None)[:4]
    if epsilon is None:
        epsilon = torch.finfo(torch.float32).eps  # what aten takes, and it computes in fp32
    args = (x, len(size), weight, epsilon)
    return insert(program.graph, own.whole_rms_norm.default, args, like=node)
