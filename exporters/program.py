"""Facts about a program whose ops an engine runs one by one."""

from collections import Counter

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from enginecast.passes.ir.blocks import all_nodes
from enginecast.passes.ir.edit import aten, first_input
from enginecast.passes.ir.match import is_call


def op_counts(program: ExportedProgram) -> dict[str, int]:
    """How often each op is called, blocks included, as "aten::linear"; a norm that reads a sum is
    counted as "aten::add+rms_norm", which Inductor makes one kernel of.
    """
    counted: Counter[str] = Counter()
    for node in all_nodes(program):
        if node.op == "call_function":
            counted[_op_name(node)] += 1
    return dict(sorted(counted.items()))


def _op_name(node: Node) -> str:
    if is_call(node, aten.rms_norm.default) and is_call(first_input(node), aten.add.Tensor):
        return "aten::add+rms_norm"
    if isinstance(node.target, torch._ops.OpOverload):
        return str(node.target.overloadpacket._qualified_op_name)
    return str(getattr(node.target, "__name__", node.target))
