"""Fold a batch norm into the weight and bias of the convolution before it.

    before:  %c = aten.conv2d(%x, %w, %b)
             %n = aten.batch_norm(%c, %gamma, %beta, %mean, %var, False, 0.1, 1e-05, False)
    after:   %f = aten.mul(%gamma, aten.rsqrt(%var + 1e-05))            of weights alone
             %n = aten.conv2d(%x, %w * %f, (%b - %mean) * %f + %beta)

Targets fold such norms themselves in float models. An int8 convolution rounds its output, and the
norm would remain a separate float op after it.

Left alone, with the reason: a norm that uses batch statistics, one that does not follow a
convolution, and a convolution with another reader.

Promises `reordered`: a product of weights is rounded before it is multiplied with a value.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch.fx import Node

from enginecast.passes.ir.base import GraphPass, PassContext, ProgramView, Promise, Site
from enginecast.passes.ir.edit import (
    arguments,
    aten,
    dtype_of,
    erase_dead,
    insert,
    shape_of,
    weight_expressions,
)
from enginecast.passes.ir.match import is_call
from enginecast.passes.ir.sites import SiteLog
from enginecast.passes.ir.source import LAYER, layer_stack
from enginecast.passes.ir.traits import Trait, has


@dataclass(frozen=True)
class FoldBatchNorm(GraphPass):
    """Fold a batch norm into the convolution before it."""

    name: ClassVar[str] = "fold-batch-norm"
    promise: ClassVar[Promise] = "reordered"
    after: ClassVar[frozenset[str]] = frozenset({"canonicalize", "unify-dtype"})

    def run(self, program: ProgramView, context: PassContext) -> list[Site]:
        log = SiteLog(context)
        weights = weight_expressions(program)
        for node in list(program.graph.nodes):
            if not is_call(node, aten.batch_norm.default):
                continue
            reason = _refusal(node, weights)
            if reason:
                log.refused(node, reason)
            elif not log.skipped(node):
                log.done(node)
                _fold(program, node, weights)
        erase_dead(program.graph)
        return log.sites


def _refusal(norm: Node, weights: set[Node]) -> str:
    """Why a norm is left alone; empty: it is folded."""
    conv, *constants, training = arguments(norm)[:6]
    if training:
        return "it computes statistics from its input"
    if not has(conv, Trait.CONVOLVES):
        return "it does not follow a convolution"
    if len(conv.users) > 1:
        return "something else reads the convolution, too"
    read = [*constants, *conv.args[1:3]]
    if any(isinstance(found, Node) and found not in weights for found in read):
        return "a weight is computed from an input"
    if None in constants[2:]:
        return "it has no statistics"
    if len({dtype_of(found) for found in read if found is not None}) > 1:
        return "the weights have several dtypes"
    if len(shape_of(conv)) != len(shape_of(arguments(conv)[1])):
        return "the convolution has no batch dimension"  # the norm takes channels for the batch
    return ""


def _fold(program: ProgramView, norm: Node, weights: set[Node]) -> None:
    conv, gamma, beta, mean, variance, _, _, epsilon = arguments(norm)[:8]
    _, weight, *rest = conv.args
    bias, sizes = (rest[0], rest[1:]) if rest else (None, ())

    def add(target: object, *args: object) -> Node:
        return insert(program.graph, target, args, like=norm)  # type: ignore[arg-type]

    with program.graph.inserting_before(norm):
        factor = add(aten.rsqrt.default, add(aten.add.Scalar, variance, epsilon))
        factor = factor if gamma is None else add(aten.mul.Tensor, gamma, factor)
        ones = [1] * (len(shape_of(weight)) - 2)
        if has(conv, Trait.TRANSPOSED):  # [in, out / groups, ...]
            groups = arguments(conv)[6] if len(conv.args) > 6 else 1
            whole = add(aten.unflatten.int, weight, 0, [groups, -1])
            rows = add(aten.reshape.default, factor, [groups, 1, -1, *ones])
            folded = add(aten.flatten.using_ints, add(aten.mul.Tensor, whole, rows), 0, 1)
        else:
            rows = add(aten.reshape.default, factor, [-1, 1, *ones])
            folded = add(aten.mul.Tensor, weight, rows)
        shift = add(aten.neg.default, mean) if bias is None else add(aten.sub.Tensor, bias, mean)
        shift = add(aten.mul.Tensor, shift, factor)
        shift = shift if beta is None else add(aten.add.Tensor, shift, beta)
    norm.meta[LAYER] = dict(layer_stack(conv))
    norm.target, norm.kwargs = conv.target, {}
    norm.args = (conv.args[0], folded, shift, *sizes)
