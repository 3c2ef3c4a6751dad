"""Which values hold fill values of masks: large negative numbers that say "not here".

They sit at the end of a dtype's range by design, and adding a bias to one may take it to -inf: that
is neither an overflow of the model nor lack of headroom.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import Node

from enginecast.passes.dtype_ops import ELEMENTWISE_PAIR, JOINS, LITERALS, SHAPE_ONLY
from enginecast.passes.graph_edit import aten, is_float, weight_specs, weight_tensor
from enginecast.passes.match import CASTS

LARGE = 6e4
"""Nobody masks with less in fp16, whose range ends at 65,504."""
_SMALL_CONSTANT = 64
_CLAMPS = frozenset({aten.clamp.default, aten.clamp_.default, aten.clamp_min.default})
_HAND_ON = (
    frozenset(
        {
            *SHAPE_ONLY,
            *JOINS,
            *ELEMENTWISE_PAIR,
            *LITERALS,
            *CASTS,
            aten.add_.Tensor,
            aten.mul_.Tensor,
            aten.maximum.default,
            aten.index.Tensor,
            aten.repeat.default,
            aten.rsub.Scalar,
        }
    )
    - _CLAMPS  # a clamp bounds values: it fills none in
)


def fill_values(program: ExportedProgram) -> set[Node]:
    """Nodes that hold fill values, as far as views, casts and elementwise arithmetic carry them."""
    constants = _constants(program)
    found: set[Node] = set()
    for node in program.graph.nodes:
        if node in constants:
            found.add(node)
        elif node.op == "call_function" and node.target in _HAND_ON and is_float(node):
            given = (*node.args, *node.kwargs.values())
            inherited = any(source in found for source in node.all_input_nodes)
            if inherited or any(_is_fill(argument) for argument in given):
                found.add(node)
    return found


def _is_fill(argument: Any) -> bool:
    is_number = isinstance(argument, int | float) and not isinstance(argument, bool)
    return is_number and not math.isnan(argument) and argument <= -LARGE


def _constants(program: ExportedProgram) -> set[Node]:
    """Small constants that are or hold a fill value."""
    specs = weight_specs(program)
    found: set[Node] = set()
    for node in program.graph.nodes:
        if node.op != "placeholder" or node.name not in specs:
            continue
        tensor: Tensor = weight_tensor(program, specs[node.name])
        is_small = tensor.is_floating_point() and 0 < tensor.numel() <= _SMALL_CONSTANT
        if is_small and bool((tensor.to(torch.float32) <= -LARGE).any()):
            found.add(node)
    return found
