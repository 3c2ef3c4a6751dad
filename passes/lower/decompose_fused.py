"""Decompose our fused ops into plain aten ops, for compilers that do their own fusion.

    before:  %a = enginecast.attention(%q, %k, %v, ...)
             %n = enginecast.skip_rms_norm(%x, %y, %w, 1e-6)
    after:   %a = aten.scaled_dot_product_attention(%q, %k, %v, ...)
             %s = aten.add.Tensor(%x, %y)
             %n = aten.rms_norm(%s, [d], %w, 1e-6)

An op of our own is opaque to such a compiler: it calls it, and fuses nothing into it.  Promises
`exact`: the plain forms are what our ops are defined by.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.fx import Node

from enginecast.ops.traits import OWN
from enginecast.passes.ir.base import GraphPass, PassContext, ProgramView, Promise, Site
from enginecast.passes.ir.edit import arguments
from enginecast.passes.ir.rules import Rewrite, apply_rules, insert_traced

ours = torch.ops.enginecast


@dataclass(frozen=True)
class DecomposeFused(GraphPass):
    """Decompose our fused ops into ops that torch's compilers know."""

    name: ClassVar[str] = "decompose-fused"
    promise: ClassVar[Promise] = "exact"

    def run(self, program: ProgramView, context: PassContext) -> list[Site]:
        return apply_rules(program, context, RULES)


def _definition(program: ProgramView, node: Any) -> Any:
    """The ops that one of ours is defined by."""
    found = insert_traced(program, node, OWN[node.target].definition)
    if isinstance(found, Node):
        return found
    for user in list(node.users):  # reads one of several results
        user.replace_all_uses_with(found[arguments(user)[1]])
        program.graph.erase_node(user)
    return found[0]


RULES: Mapping[object, Rewrite] = dict.fromkeys(
    (ours.attention.default, ours.skip_rms_norm.default), _definition
)
"""Op -> what replaces a call of it."""
