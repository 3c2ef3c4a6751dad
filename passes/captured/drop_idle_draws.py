"""Random numbers that are multiplied by zero, as noise that a scale of zero switches off.

What is drawn is finite: zeros give the same result, also where another factor is not finite.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from enginecast.library_names import aten
from enginecast.passes.ir.base import CapturePass, PassContext, Site
from enginecast.passes.ir.blocks import all_nodes
from enginecast.passes.ir.match import real_users
from enginecast.passes.ir.sites import SiteLog
from enginecast.passes.ir.traits import Trait, has

_SIZED = (aten.randn.default, aten.rand.default)
_LIKE = (aten.randn_like.default, aten.rand_like.default)
_MULTIPLIES = (aten.mul.Tensor, aten.mul.Scalar)
_DIVIDES = (aten.div.Tensor, aten.div.Scalar)


@dataclass(frozen=True)
class DropIdleDraws(CapturePass):
    """Replace random draws by zeros if every value that is computed from them is multiplied by zero
    while it is linear in them still.
    """

    name: ClassVar[str] = "drop-idle-draws"

    def run(self, program: ExportedProgram, context: PassContext) -> list[Site]:
        log = SiteLog(context)
        while True:  # the product of one draw with zero may be the zero of another
            idle = [node for node in all_nodes(program) if _draws(node) and _is_idle(node)]
            for node in idle:
                log.done(node)
                _replace(node)
            if not idle:
                return log.sites


def _draws(node: Node) -> bool:
    return node.target in _SIZED or node.target in _LIKE


def _is_idle(draw: Node) -> bool:
    waiting, seen = [draw], {draw}
    while waiting:
        node = waiting.pop()
        for user in real_users(node):
            if _is_product_with_zero(user, node):
                continue
            if not _is_linear(user, node):
                return False
            if user not in seen:
                seen.add(user)
                waiting.append(user)
    return True


def _is_product_with_zero(node: Node, factor: Node) -> bool:
    if node.target not in _MULTIPLIES:
        return False
    return any(_is_zero(other) for other in node.args[:2] if other is not factor)


def _is_linear(node: Node, of: Node) -> bool:
    """Whether zero, in place of a finite number, gives zero or what is no number in either case."""
    if node.target in _MULTIPLIES:
        return node.args[0] is not node.args[1]
    if node.target in _DIVIDES:
        return node.args[0] is of and node.args[1] is not of
    is_moved = has(node, Trait.MOVES) or has(node, Trait.CASTS)
    return is_moved and node.args[0] is of and torch.is_floating_point(node.meta["val"])


def _is_zero(value: object) -> bool:
    """Whether a factor is zero in every call."""
    if not isinstance(value, Node):
        return isinstance(value, (int, float)) and value == 0
    if value.target in (aten.full.default, aten.full_like.default):
        return _is_zero(value.args[1])
    if value.target in _MULTIPLIES:  # of zeros with zero: any other factor may not be finite
        return all(map(_is_zero, value.args[:2]))
    return has(value, Trait.MOVES) and _is_zero(value.args[0])


def _replace(node: Node) -> None:
    kwargs = {name: value for name, value in node.kwargs.items() if name != "generator"}
    target = aten.full.default if node.target in _SIZED else aten.full_like.default
    with node.graph.inserting_before(node):
        zeros = node.graph.call_function(target, (node.args[0], 0.0), kwargs)
    zeros.meta = dict(node.meta)
    node.replace_all_uses_with(zeros)
    node.graph.erase_node(node)
