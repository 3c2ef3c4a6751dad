"""Clamps that transformers applies only to fp16, and that torch.export bakes into a program.

    if hidden_states.dtype == torch.float16:                 (modeling_t5.py)
        clamp_value = torch.where(torch.isinf(hidden_states).any(), max - 1000, max)
        hidden_states = torch.clamp(hidden_states, min=-clamp_value, max=clamp_value)

    %any = aten.any(aten.isinf(%h))
    %limit = aten.where.Scalar(%any, 64504.0, 65504.0)
    %clamp: f16 = aten.clamp.Tensor(%h: f16, aten.neg(%limit), %limit)

Whether they are there depends on the dtype that the model was captured in: in fp16 they are, in
fp32 and bf16 they are not.  Other models (BART, Whisper) clamp to +-64504 without the `where`.
"""

from dataclasses import dataclass

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from enginecast.passes.ir.edit import arguments, aten, dtype_of, erase_dead, first_input
from enginecast.passes.ir.match import is_call

LARGEST = torch.finfo(torch.float16).max
LIMITS = (LARGEST - 1000, LARGEST)
MEANING = (
    "values beyond +-65504 become finite and wrong instead of infinite: a check for NaN does not"
    " see it"
)


@dataclass(frozen=True)
class InfClamp:
    """A clamp, and the value that it clamps."""

    node: Node
    source: Node


def find_inf_clamps(program: ExportedProgram) -> tuple[InfClamp, ...]:
    """Every clamp of an fp16 value to the range of fp16."""
    return tuple(
        InfClamp(node, first_input(node))
        for node in program.graph.nodes
        if is_call(node, aten.clamp.Tensor, aten.clamp.default)
        and dtype_of(first_input(node)) == torch.float16
        and _is_range(*(*arguments(node)[1:], None, None)[:2])
    )


def drop_inf_clamps(program: ExportedProgram) -> tuple[Node, ...]:
    """Take them out of a program, in place; returns the clamps that were erased.

    A value within fp16's range passes them as it is.
    """
    clamps = find_inf_clamps(program)
    for clamp in clamps:
        clamp.node.replace_all_uses_with(clamp.source)
        program.graph.erase_node(clamp.node)
    if clamps:
        erase_dead(program.graph)
    return tuple(clamp.node for clamp in clamps)


def _is_range(low: object, high: object) -> bool:
    if isinstance(low, int | float) and isinstance(high, int | float):
        return low == -high and high in LIMITS
    if not is_call(low, aten.neg.default) or low.args[0] is not high:
        return False
    # 64504 where some value is infinite, else 65504.
    if not is_call(high, aten.where.Scalar) or not set(high.args[1:3]) <= set(LIMITS):
        return False
    condition = high.args[0]
    return is_call(condition, aten.any.default) and is_call(condition.args[0], aten.isinf.default)
