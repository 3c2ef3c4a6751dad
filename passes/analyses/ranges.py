"""Ranges of integer values, derived from how they are computed: enough to prove that a comparison
always holds.
"""

import math
from typing import Any

import torch
from torch.fx import Node

from enginecast.passes.ir.edit import aten, value
from enginecast.passes.ir.match import is_call
from enginecast.passes.ir.traits import Trait, has

Interval = tuple[float, float]


def interval(node: Any) -> Interval | None:
    """Bounds of every element of an integer tensor, both inclusive; None when nothing is known."""
    if isinstance(node, int):
        return float(node), float(node)
    if not isinstance(node, Node):
        return None
    if is_call(node, aten.arange.default):
        return 0.0, max(0.0, largest_size(node.args[0]) - 1)
    if has(node, Trait.MOVES):
        return interval(node.args[0])
    if not is_call(node, aten.add.Tensor, aten.sub.Tensor) or "alpha" in node.kwargs:
        return None
    left, right = interval(node.args[0]), interval(node.args[1])
    if left is None or right is None:
        return None
    if is_call(node, aten.add.Tensor):
        return left[0] + right[0], left[1] + right[1]
    return left[0] - right[1], left[1] - right[0]


def largest_size(size: Any) -> float:
    """The largest value that a size can have; infinity when nothing bounds it."""
    known = value(size) if isinstance(size, Node) else size
    if isinstance(known, int):
        return float(known)
    if not isinstance(known, torch.SymInt):
        return math.inf
    most = known.node.shape_env.bound_sympy(known.node.expr).upper
    return float(most) if most.is_number else math.inf


def always(node: Node) -> bool | None:
    """What a boolean node is in every element, for every input; None when it depends."""
    if is_call(node, aten.ge.Scalar):
        bounds, threshold = interval(node.args[0]), node.args[1]
        if bounds is not None and isinstance(threshold, int):
            return True if bounds[0] >= threshold else False if bounds[1] < threshold else None
    if is_call(node, aten.new_ones.default, aten.ones.default, aten.ones_like.default):
        return True
    if has(node, Trait.MOVES, Trait.CASTS):
        source = node.args[0]
        return always(source) if isinstance(source, Node) else None
    if is_call(node, aten.__and__.Tensor, aten.bitwise_and.Tensor):
        known = [always(a) if isinstance(a, Node) else None for a in node.args[:2]]
        return True if known == [True, True] else False if False in known else None
    return None
