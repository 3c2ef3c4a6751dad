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
    insert,
    shape_of,
    weight_expressions,
)
from enginecast.passes.ir.match import NoMatch, is_call
from enginecast.passes.ir.rules import rewrite_sites
from enginecast.passes.ir.source import LAYER, layer_stack
from enginecast.passes.ir.traits import Trait, has


@dataclass(frozen=True)
class FoldBatchNorm(GraphPass):
    """Fold a batch norm into the convolution before it."""

    name: ClassVar[str] = "fold-batch-norm"
    promise: ClassVar[Promise] = "reordered"
    after: ClassVar[frozenset[str]] = frozenset({"canonicalize", "unify-dtype"})

    def run(self, program: ProgramView, context: PassContext) -> list[Site]:
        weights = weight_expressions(program)

        def is_norm(node: Node) -> bool:
            return is_call(node, aten.batch_norm.default)

        def fold(node: Node) -> str:
            _check(node, weights)
            _fold(program, node)
            return ""

        return rewrite_sites(program, context, is_norm, fold)


def _check(norm: Node, weights: set[Node]) -> None:
    """Raise NoMatch if a norm cannot be folded."""
    conv, *constants, training = arguments(norm)[:6]
    if training:
        raise NoMatch(norm, "it computes statistics from its input")
    if not has(conv, Trait.CONVOLVES):
        raise NoMatch(norm, "it does not follow a convolution")
    if len(conv.users) > 1:
        raise NoMatch(norm, "something else reads the convolution, too")
    read = [*constants, *conv.args[1:3]]
    if any(isinstance(found, Node) and found not in weights for found in read):
        raise NoMatch(norm, "a weight is computed from an input")
    if None in constants[2:]:
        raise NoMatch(norm, "it has no statistics")
    if len({dtype_of(found) for found in read if found is not None}) > 1:
        raise NoMatch(norm, "the weights have several dtypes")
    if len(shape_of(conv)) != len(shape_of(arguments(conv)[1])):
        # The norm takes channels for the batch.
        raise NoMatch(norm, "the convolution has no batch dimension")


def _fold(program: ProgramView, norm: Node) -> None:
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
