"""Replace an RMS norm written out in plain ops by one `aten.rms_norm`.

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
statistic over other dims or over a size that varies, a multiplicand that is not the value that was
measured, a cast inside that rounds more than the result does.  A second reader
of rstd or of the upcast x keeps its nodes.

Source: Zhang and Sennrich 2019, https://arxiv.org/abs/1910.07467; ONNX RMSNormalization, opset 23.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx import Node

from enginecast.passes.analyses.norms import is_statistic, normalized
from enginecast.passes.ir.base import GraphPass, PassContext, ProgramView, Promise, Site
from enginecast.passes.ir.edit import (
    aten,
    dtype_of,
    first_input,
    insert,
    shape_of,
    weight_expressions,
)
from enginecast.passes.ir.match import NoMatch, is_float_cast, last_dim
from enginecast.passes.ir.pattern import Match, Pattern, Value, either, op
from enginecast.passes.ir.rules import rewrite_sites
from enginecast.passes.ir.text import dtype_text
from enginecast.passes.ir.traits import Trait


@dataclass(frozen=True)
class FuseRmsNorm(GraphPass):
    """Replace the pow-mean-rsqrt-mul chain by one rms_norm."""

    name: ClassVar[str] = "fuse-rms-norm"
    # Casts decide whether the chain is one norm; they have to be the final ones.
    after: ClassVar[frozenset[str]] = frozenset({"unify-dtype", "canonicalize"})
    promise: ClassVar[Promise] = "reordered"

    def run(self, program: ProgramView, context: PassContext) -> list[Site]:
        weights = weight_expressions(program)

        def fuse(node: Node) -> str:
            return _fuse(program, _with_weight(node, weights).match(node))

        return rewrite_sites(program, context, is_statistic, fuse)


def _with_weight(mean: Node, weights: set[Node]) -> Pattern:
    """The norm around a mean of squares, with cast and weight product that nothing else reads."""
    once = normalized.once("before the weight")
    low = op(Trait.CASTS)(once).named("low")
    low = low.where(
        lambda cast: is_float_cast(cast) and dtype_of(cast) != dtype_of(first_input(cast)),
        "a cast that changes nothing",
    )
    weight = Value(label="weight").where(
        lambda node: node in weights and shape_of(node) == (last_dim(first_input(mean)),),
        "no weight",
    )
    return either(weight * low.once("before the weight"), low, weight * once, normalized)


def _fuse(program: ProgramView, match: Match) -> str:
    """Insert the norm; return a note on roundings that moved.

    Its input is the one whose dtype it can keep: the stream value, or its upcast where the product
    is fp32.
    """
    out, weight, low = match.root, match.get("weight"), match.get("low")
    measured, scaled = match.node("measured"), match.node("scaled")
    wanted = dtype_of(out)
    if not isinstance(last_dim(measured), int):
        raise NoMatch(measured, "the size that the norm is over varies")
    source = next((n for n in (match.node("x"), measured) if dtype_of(n) == wanted), None)
    if source is None and dtype_of(measured) == dtype_of(scaled):
        source, weight, out = measured, None, scaled
        note = f"in {_dtype(scaled)}, the weight product outside"
    elif source is None:
        raise NoMatch(out, f"the input is {_dtype(measured)} and the result {_dtype(out)}")
    elif weight is not None and dtype_of(weight) != wanted:
        found = f"the weight is {_dtype(weight)} and the product {_dtype(out)}"
        raise NoMatch(weight, f"{found}: run unify-dtype first")
    elif wanted in (torch.float16, torch.bfloat16) and dtype_of(scaled) == wanted:
        note = "the statistic, in the low dtype before, is fp32 now"
    elif low is not None and weight is not None:
        note = f"the rounding to {_dtype(out)} before the weight product moved behind it"
    else:
        note = "the products are in another order"
    _check_casts(out, {match.node("x"), source, weight})
    args = (source, [last_dim(source)], weight, match.number("epsilon"))
    with program.graph.inserting_before(out):
        fused = insert(program.graph, aten.rms_norm.default, args, like=out)
    out.replace_all_uses_with(fused)
    return note


def _check_casts(out: Node, ends: set[Node | None]) -> None:
    """Raise NoMatch if an inner cast rounds more than the result does."""
    waiting, wanted = [out], dtype_of(out)
    assert wanted is not None
    while waiting:
        node = waiting.pop()
        dtype = dtype_of(node)
        if is_float_cast(node) and dtype and torch.finfo(dtype).eps > torch.finfo(wanted).eps:
            raise NoMatch(node, f"a cast to {_dtype(node)} rounds within the norm")
        waiting += [source for source in node.all_input_nodes if source not in ends]


def _dtype(node: Node) -> str:
    return dtype_text(dtype_of(node))
