"""Replace a spelled-out GELU by `aten.gelu`.

    before:  %half = aten.mul(%x, 0.5)                after:  %g = aten.gelu(%x, approximate="tanh")
             %cube = aten.pow(%x, 3.0)
             %c = aten.mul(%cube, 0.044715)
             %inner = aten.add(%x, %c)
             %arg = aten.mul(%inner, 0.7978845608)
             %t = aten.tanh(%arg)
             %one = aten.add(%t, 1.0)
             %g = aten.mul(%half, %one)

Also the erf form, `x * 0.5 * (1 + erf(x / sqrt(2)))`, as `approximate="none"`.  aten.gelu works in
fp32 inside, so the cube cannot overflow in fp16 on the way.  Left alone, with the reason: other
constants (quick-gelu), inner values that something else reads as well as the whole being one gelu
are kept for that reader.

Source: Hendrycks and Gimpel 2016, https://arxiv.org/abs/1606.08415.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

from torch.export import ExportedProgram
from torch.fx import Node

from enginecast.passes.base import Pass, PassContext, Promise, Site
from enginecast.passes.graph_edit import aten, erase_dead, insert
from enginecast.passes.match import (
    NoMatch,
    is_call,
    op_name,
    operands,
    scalar_of,
    scalar_operand,
    single_user,
)
from enginecast.passes.sites import SiteLog


@dataclass(frozen=True)
class FuseGelu(Pass):
    """Replace a spelled-out GELU (tanh or erf form) by one gelu."""

    name: ClassVar[str] = "fuse-gelu"
    after: ClassVar[frozenset[str]] = frozenset({"canonicalize"})
    promise: ClassVar[Promise] = "reordered"
    in_blocks: ClassVar[bool] = True

    def run(self, program: ExportedProgram, context: PassContext) -> list[Site]:
        log = SiteLog(context)
        for node in list(program.graph.nodes):
            if not is_call(node, aten.tanh.default, aten.erf.default) or log.skipped(node):
                continue
            try:
                source, out = match_gelu(node)
            except NoMatch as miss:
                log.refused(node, miss.reason)
                continue
            form = "tanh" if is_call(node, aten.tanh.default) else "none"
            with program.graph.inserting_before(out):
                fused = insert(
                    program.graph,
                    aten.gelu.default,
                    (source,),
                    {"approximate": form},
                    like=out,
                )
            out.replace_all_uses_with(fused)
            log.done(node, f"gelu({form})")
        erase_dead(program.graph)
        return log.sites


def match_gelu(core: Node) -> tuple[Node, Node]:
    """The gelu around a tanh or an erf: its input and its last node.

    Raises:
        NoMatch: with the reason why it is not one.
    """
    argument = core.args[0]
    assert isinstance(argument, Node)
    source = _tanh_source(argument) if is_call(core, aten.tanh.default) else _erf_source(argument)
    plus_one = single_user(core, where="after the core of a gelu")
    scalar_of(plus_one, aten.add.Tensor, 1.0, where="after the core of a gelu")
    return source, _half_product(plus_one, source)


def _tanh_source(argument: Node) -> Node:
    """x, for sqrt(2/pi) * (x + 0.044715 * x^3), or x * sqrt(2/pi) * (1 + 0.044715 * x * x)."""
    if scalar_operand(argument, aten.mul.Tensor) is not None:
        inner = scalar_of(argument, aten.mul.Tensor, math.sqrt(2 / math.pi), where="under tanh")
        return _cubic_source(inner)
    return _factored_source(argument)


def _cubic_source(inner: Node) -> Node:
    if not is_call(inner, aten.add.Tensor):
        raise NoMatch(inner, f"{op_name(inner)} under tanh, expected x + 0.044715 * x^3")
    for source, cubic in operands(inner):
        split = scalar_operand(cubic, aten.mul.Tensor) if isinstance(cubic, Node) else None
        if split is not None and is_call(split[0], aten.pow.Tensor_Scalar):
            cube = scalar_of(cubic, aten.mul.Tensor, 0.044715, where="beside x under tanh")
            if cube.args == (source, 3) and isinstance(source, Node):
                return source
    raise NoMatch(inner, "no x + 0.044715 * x^3 of one x under tanh")


def _factored_source(argument: Node) -> Node:
    """GELU "fast": x * 0.79788 * (1 + 0.044715 * x * x)."""
    if not is_call(argument, aten.mul.Tensor):
        raise NoMatch(argument, f"{op_name(argument)} under tanh, expected a product")
    for scaled, rest in operands(argument):
        split = scalar_operand(scaled, aten.mul.Tensor) if isinstance(scaled, Node) else None
        if split is None or not isinstance(rest, Node):
            continue
        source = scalar_of(scaled, aten.mul.Tensor, math.sqrt(2 / math.pi), where="under tanh")
        square = scalar_of(rest, aten.add.Tensor, 1.0, where="under tanh")
        for left, right in operands(square):
            if right is not source or not isinstance(left, Node):
                continue
            if scalar_of(left, aten.mul.Tensor, 0.044715, where="under tanh") is source:
                return source
    raise NoMatch(argument, "no x * 0.79788 * (1 + 0.044715 * x * x) of one x under tanh")


def _erf_source(argument: Node) -> Node:
    """x, for x / sqrt(2)."""
    if is_call(argument, aten.div.Tensor):
        return scalar_of(argument, aten.div.Tensor, math.sqrt(2), where="under erf")
    return scalar_of(argument, aten.mul.Tensor, math.sqrt(0.5), where="under erf")


def _half_product(plus_one: Node, source: Node) -> Node:
    """The last node of (0.5 * x) * (1 + core), or of 0.5 * (x * (1 + core))."""
    product = single_user(plus_one, where="before the product of a gelu")
    if not is_call(product, aten.mul.Tensor):
        raise NoMatch(product, f"{op_name(product)} reads 1 + core, expected a product")
    for factor, rest in operands(product):
        if rest is not plus_one or not isinstance(factor, Node):
            continue
        if factor is source:
            out = single_user(product, where="at the end of a gelu")
            scalar_of(out, aten.mul.Tensor, 0.5, where="at the end of a gelu")
            return out
        if scalar_of(factor, aten.mul.Tensor, 0.5, where="beside 1 + core") is source:
            return product
    raise NoMatch(product, "the product is not with half of the value under the core")
