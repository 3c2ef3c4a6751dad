"""Replace a GELU written out in plain ops by `aten.gelu`.

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
constants (quick-gelu, or few digits of these) and integers.  Inner values that something else reads
as well as the whole being one gelu are kept for that reader.

Source: Hendrycks and Gimpel 2016, https://arxiv.org/abs/1606.08415.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

from torch.fx import Node

from enginecast.passes.ir.base import GraphPass, PassContext, ProgramView, Promise, Site
from enginecast.passes.ir.edit import aten, dtype_of, insert, is_float
from enginecast.passes.ir.match import is_call, scalar_operand
from enginecast.passes.ir.pattern import Pattern, Value, either, op, pattern
from enginecast.passes.ir.rules import rewrite_sites
from enginecast.passes.ir.text import dtype_text

_tanh, _erf = op(aten.tanh.default), op(aten.erf.default)


@pattern
def gelu(x: Value) -> Pattern:
    """x * 0.5 * (1 + core), in either order of the products; the site is the core."""
    x = x.where(is_float, lambda node: f"a gelu of {dtype_text(dtype_of(node))}: it takes floats")
    root = math.sqrt(2 / math.pi)
    scaled = (x * root).at("under tanh")
    cube = (x**3 * 0.044715).at("beside x under tanh")
    square = (x * 0.044715).at("under tanh") * x
    tanh = either(((x + cube) * root).at("under tanh"), (scaled * (square + 1)).at("under tanh"))
    erf = either((x * math.sqrt(0.5)).at("under erf"), (x / math.sqrt(2)).at("under erf"))

    same = x.otherwise("the product is not with half of the value under the core")
    factor = "{op} reads 1 + core, expected a product"
    core = either(_tanh(tanh).site(), _erf(erf).site()).once("after the core of a gelu")
    plus = (core + 1).at("after the core of a gelu").once("before the product of a gelu")
    halved = (same * 0.5).at("beside 1 + core") * plus
    whole = (same * plus).otherwise(factor).once("at the end of a gelu") * 0.5
    return either(whole.at("at the end of a gelu"), halved.otherwise(factor))


@dataclass(frozen=True)
class FuseGelu(GraphPass):
    """Replace a spelled-out GELU (tanh or erf form) by one gelu."""

    name: ClassVar[str] = "fuse-gelu"
    after: ClassVar[frozenset[str]] = frozenset({"canonicalize"})
    promise: ClassVar[Promise] = "reordered"

    def run(self, program: ProgramView, context: PassContext) -> list[Site]:
        def fuse(node: Node) -> str:
            match = gelu.match(node)
            form = "tanh" if is_call(node, aten.tanh.default) else "none"
            args, kwargs = (match.node("x"),), {"approximate": form}
            with program.graph.inserting_before(match.root):
                fused = insert(program.graph, aten.gelu.default, args, kwargs, like=match.root)
            match.root.replace_all_uses_with(fused)
            return f"gelu({form})"

        def is_core(node: Node) -> bool:
            if is_call(node, aten.tanh.default):  # of a pooler or a gate, if nothing adds a number
                return any(scalar_operand(user, aten.add.Tensor) for user in node.users)
            return is_call(node, aten.erf.default)

        return rewrite_sites(program, context, is_core, fuse)
