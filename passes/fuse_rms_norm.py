"""Replace the spelled-out root-mean-square norm by one `aten.rms_norm`.

    before (T5, fp16):
        %up: f32 = aten.to.dtype(%x, f32)
        %sq = aten.pow(%up, 2)
        %mean = aten.mean.dim(%sq, [-1], True)
        %eps = aten.add(%mean, 1e-06)
        %rstd = aten.rsqrt(%eps)
        %scaled: f32 = aten.mul(%x, %rstd)
        %low: f16 = aten.to.dtype(%scaled, f16)
        %norm: f16 = aten.mul(%weight, %low)
    after:
        %norm: f16 = aten.rms_norm(%x, [d], %weight, 1e-06)

Spellings: T5 (x or its upcast as multiplicand, with and without casts), Llama and Qwen (weight
after the cast back), Gemma (fp32 product with 1 + w: the fused norm then runs on the upcast x and
the cast back stays), no weight, `1 / sqrt` for rsqrt.

aten.rms_norm computes in fp32 inside, weight product included, and rounds once: never fewer fp32
steps than the source. Where the source rounded before the weight product, that rounding moves; the
site says so.

Must not happen: x and weight of different dtypes (ONNX Runtime refuses to load such a norm), a
statistic over other dims, a multiplicand that is not the value that was measured.  A second reader
of rstd or of the upcast x keeps its nodes.

Source: Zhang and Sennrich 2019, https://arxiv.org/abs/1910.07467; ONNX RMSNormalization, opset 23.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from enginecast.passes.base import Pass, PassContext, Promise, Site
from enginecast.passes.graph_edit import (
    aten,
    dtype_of,
    erase_dead,
    insert,
    shape_of,
    weight_expressions,
)
from enginecast.passes.ir_text import dtype_text
from enginecast.passes.match import (
    NoMatch,
    behind_casts,
    is_call,
    is_float_cast,
    last_dim,
    operands,
    real_users,
    reduces_last_dim,
    scalar_operand,
)
from enginecast.passes.sites import SiteLog


@dataclass(frozen=True)
class RmsNorm:
    """A matched norm: `out = source / sqrt(mean(source^2) + epsilon) * weight`."""

    source: Node
    """The value to normalise, in the dtype that the fused norm takes."""
    weight: Node | None
    epsilon: float
    out: Node
    """The node that the fused norm replaces."""
    note: str


@dataclass(frozen=True)
class Normalised:
    """The chain that divides a value by its root mean square."""

    measured: Node
    square: Node
    mean: Node
    plus: Node
    """Adds epsilon."""
    epsilon: float
    root: Node
    """Of the sum, or its reciprocal."""
    scaled: Node
    """The measured value over the root."""


@dataclass(frozen=True)
class FuseRmsNorm(Pass):
    """Replace the pow-mean-rsqrt-mul chain by one rms_norm."""

    name: ClassVar[str] = "fuse-rms-norm"
    # Casts decide whether the chain is one norm; they have to be the final ones.
    after: ClassVar[frozenset[str]] = frozenset({"unify-dtype", "canonicalize"})
    promise: ClassVar[Promise] = "reordered"
    in_blocks: ClassVar[bool] = True

    def run(self, program: ExportedProgram, context: PassContext) -> list[Site]:
        log = SiteLog(context)
        weights = weight_expressions(program)
        for node in list(program.graph.nodes):
            if not is_statistic(node) or log.skipped(node):
                continue
            try:
                match = match_rms_norm(node, weights)
            except NoMatch as miss:
                log.refused(node, miss.reason)
                continue
            _fuse(program, match)
            log.done(node, match.note)
        erase_dead(program.graph)
        return log.sites


def is_statistic(node: Node) -> bool:
    """A mean of squares that a root follows: every such place is a site."""
    if not is_call(node, aten.mean.dim):
        return False
    square = node.args[0]
    assert isinstance(square, Node)
    if _squared(square) is None:
        return False
    rest = [u for a in real_users(node) for u in real_users(a)]
    return any(is_call(u, aten.rsqrt.default, aten.sqrt.default) for u in rest)


def match_rms_norm(mean: Node, weights: set[Node]) -> RmsNorm:
    """Match the norm around a mean of squares.

    Raises:
        NoMatch: with the reason why it is not one.
    """
    found = normalised(mean)
    return _with_weight(found.measured, found.epsilon, found.scaled, weights)


def normalised(mean: Node) -> Normalised:
    """Match what is around a mean of squares, up to the product with a weight.

    Raises:
        NoMatch: with the reason why it is no norm.
    """
    square = mean.args[0]
    assert isinstance(square, Node)
    measured = _squared(square)
    assert measured is not None
    if not reduces_last_dim(mean):
        raise NoMatch(mean, f"the mean is over dims {mean.args[1]}, expected the last one, kept")
    for plus in real_users(mean):
        split = scalar_operand(plus, aten.add.Tensor)
        if split is None:
            continue
        for root in real_users(plus):
            if is_call(root, aten.rsqrt.default):
                scaled = _multiplied(root, measured)
            elif is_call(root, aten.sqrt.default):
                scaled = _divided(root, measured)
            else:
                continue
            return Normalised(measured, square, mean, plus, split[1], root, scaled)
    raise NoMatch(mean, "no reciprocal root over mean + epsilon follows the mean of squares")


def _squared(node: Node) -> Node | None:
    """x for `pow(x, 2)`, `square(x)` or `x * x`."""
    power = is_call(node, aten.pow.Tensor_Scalar) and node.args[1] == 2
    product = is_call(node, aten.mul.Tensor) and node.args[0] is node.args[1]
    if power or product or is_call(node, aten.square.default):
        found = node.args[0]
    else:
        return None
    assert isinstance(found, Node)
    return found


def _multiplied(rstd: Node, measured: Node) -> Node:
    products = [u for u in real_users(rstd) if is_call(u, aten.mul.Tensor)]
    for product in products:
        for left, right in operands(product):
            if right is rstd and behind_casts(left) is behind_casts(measured):
                return product
    if products:
        raise NoMatch(products[0], "the product normalises another value than the mean measured")
    names = ", ".join(str(u.target).removeprefix("aten.") for u in real_users(rstd)) or "nothing"
    raise NoMatch(rstd, f"{names} reads the reciprocal root, expected a product with the value")


def _divided(root: Node, measured: Node) -> Node:
    for user in real_users(root):
        if is_call(user, aten.div.Tensor) and user.args[1] is root:
            numerator = user.args[0]
            if isinstance(numerator, Node) and behind_casts(numerator) is behind_casts(measured):
                return user
        if is_call(user, aten.reciprocal.default):
            return _multiplied(user, measured)
    raise NoMatch(root, "no division of the measured value by the root follows")


def _with_weight(measured: Node, epsilon: float, scaled: Node, weights: set[Node]) -> RmsNorm:
    low = _cast_back(scaled)
    normalised = low or scaled
    weight, product = _weight_product(normalised, weights)
    out = product or normalised
    return _typed(measured, weight, epsilon, out, scaled, low)


def _cast_back(scaled: Node) -> Node | None:
    users = real_users(scaled)
    if len(users) == 1 and is_float_cast(users[0]) and dtype_of(users[0]) != dtype_of(scaled):
        return users[0]
    return None


def _weight_product(normalised: Node, weights: set[Node]) -> tuple[Node | None, Node | None]:
    """The weight and the product with it, when the only reader of the normalised value is that
    product.
    """
    users = real_users(normalised)
    if len(users) == 1 and is_call(users[0], aten.mul.Tensor):
        for weight, other in operands(users[0]):
            known = isinstance(weight, Node) and weight in weights
            if other is normalised and known and shape_of(weight) == (last_dim(normalised),):
                return weight, users[0]
    return None, None


def _typed(
    measured: Node,
    weight: Node | None,
    epsilon: float,
    out: Node,
    scaled: Node,
    low: Node | None,
) -> RmsNorm:
    """Choose the input whose dtype the fused norm can keep: the stream value, or its upcast where
    the product is fp32.
    """
    stream = behind_casts(measured)
    wanted = dtype_of(out)
    source = stream if dtype_of(stream) == wanted else measured
    if dtype_of(source) != wanted and dtype_of(measured) == dtype_of(scaled):
        kept = dtype_text(dtype_of(scaled))
        return RmsNorm(measured, None, epsilon, scaled, f"in {kept}, the weight product outside")
    if dtype_of(source) != wanted:
        source_name, out_name = dtype_text(dtype_of(source)), dtype_text(wanted)
        raise NoMatch(out, f"the input is {source_name} and the result {out_name}")
    if weight is not None and dtype_of(weight) != wanted:
        weight_name, out_name = dtype_text(dtype_of(weight)), dtype_text(wanted)
        raise NoMatch(
            weight, f"the weight is {weight_name} and the product {out_name}: run unify-dtype first"
        )
    if wanted in (torch.float16, torch.bfloat16) and dtype_of(scaled) == wanted:
        note = "the statistic, in the low dtype before, is fp32 now"
    elif low is not None and dtype_of(low) != wanted:
        note = f"the rounding to {dtype_text(dtype_of(low))} before the weight product is gone"
    elif low is not None and weight is not None:
        note = f"the rounding to {dtype_text(wanted)} before the weight product moved behind it"
    else:
        note = "the products are in another order"
    return RmsNorm(source, weight, epsilon, out, note)


def _fuse(program: ExportedProgram, match: RmsNorm) -> None:
    with program.graph.inserting_before(match.out):
        fused = insert(
            program.graph,
            aten.rms_norm.default,
            (match.source, [last_dim(match.source)], match.weight, match.epsilon),
            like=match.out,
        )
    match.out.replace_all_uses_with(fused)
