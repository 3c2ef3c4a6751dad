"""Replace attention in plain ops by one op that takes whole heads.

    before:  %q4 = aten.transpose(aten.view(%q, [b, s, -1, 64]), 1, 2)
             ... %k4, %v4 likewise
             %a = aten.scaled_dot_product_attention(%q4, %k4, %v4, %bias, scale=1.0)
             %y = aten.reshape(aten.transpose(%a, 1, 2), [b, s, -1])
    after:   %y = enginecast.attention(%q, %k, %v, %bias, 6, 6, 1.0, False)

Sources: `scaled_dot_product_attention`, and attention spelled out as matmul, scale, additive bias
and mask (T5 adds both), softmax, dropout, matmul.  Keys and values that were repeated for grouped-
query attention are read before the repeat. Biases are added: one that is bool counts as 0 and 1,
and a row that they make -inf throughout stays NaN. Queries that are heads first for a reason
(rotary embedding) stay so: the op takes both layouts.

A compiler that knows `scaled_dot_product_attention` gets that instead (`to=sdpa`), heads first.

Must not happen: dropout that is active, a softmax over other dims, scores that are masked by a
select (a row with everything masked would differ), scores that something else reads, queries, keys,
values or scores that one of the others broadcasts over the batch, heads or tokens.
"""

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch.export.graph_signature import InputKind
from torch.fx import Node

from enginecast.passes.analyses.attention import (
    is_attention_core,
    joined_output,
    softmax_attention,
    split_heads,
    unrepeated,
    untransposed,
)
from enginecast.passes.analyses.ranges import always
from enginecast.passes.analyses.strides import loosen_views
from enginecast.passes.ir.base import GraphPass, PassContext, ProgramView, Promise, Site
from enginecast.passes.ir.edit import (
    aten,
    dtype_of,
    insert,
    is_float,
    same_size,
    shape_of,
    take_place,
    weight_specs,
    weight_tensor,
)
from enginecast.passes.ir.effects import named_arguments
from enginecast.passes.ir.match import NoMatch, is_call
from enginecast.passes.ir.rules import rewrite_sites
from enginecast.passes.ir.text import dtype_text
from enginecast.passes.ir.traits import Trait, has


@dataclass(frozen=True)
class Attention:
    """A matched attention over heads-first tensors [batch, heads, tokens, size]."""

    query: Node
    key: Node
    value: Node
    bias: tuple[Node, ...]
    """Additive biases (summed), or one boolean mask."""
    scale: float
    causal: bool
    out: Node
    note: str = ""
    """A note if it was decomposed as softmax of a sum; empty for sdpa."""


@dataclass(frozen=True)
class FuseAttention(GraphPass):
    """Replace attention, called or spelled out, by one op over whole heads."""

    name: ClassVar[str] = "fuse-attention"
    after: ClassVar[frozenset[str]] = frozenset({"unify-dtype", "canonicalize"})
    promise: ClassVar[Promise] = "reordered"

    to: Literal["attention", "sdpa"] = "attention"
    """The replacement op: enginecast.attention, or aten.scaled_dot_product_attention."""

    def run(self, program: ProgramView, context: PassContext) -> list[Site]:
        def fuse(node: Node) -> str:
            match = _softmax(node) if is_call(node, aten.softmax.int) else _sdpa(program, node)
            _check(match)
            layout = _fuse(program, match, self.to)
            return f"{match.note}; {layout}" if match.note else layout

        return rewrite_sites(program, context, is_attention_core, fuse)


def _softmax(node: Node) -> Attention:
    match = softmax_attention.match(node)
    divisor = math.prod(match.every("divisor"))
    if divisor == 0:
        raise NoMatch(node, "the scores are divided by zero")
    return Attention(
        match.node("query"),
        untransposed(match.node("key"), match.root),
        match.node("value"),
        match.every("bias"),
        math.prod(match.every("factor")) / divisor,
        False,
        match.root,
        "softmax attention",
    )


def _sdpa(program: ProgramView, node: Node) -> Attention:
    given = named_arguments(node)
    if given["dropout_p"] != 0.0:
        raise NoMatch(node, f"dropout of {given['dropout_p']:g} is active")
    query, key, value = (given[name] for name in ("query", "key", "value"))
    mask, scale = given["attn_mask"], given["scale"]
    bias = () if mask is None else (mask,)
    if mask is not None and dtype_of(mask) == torch.bool:
        # True everywhere, as transformers' vision models build it.
        spec = weight_specs(program).get(mask.name)
        if spec is not None and spec.kind is InputKind.CONSTANT_TENSOR:
            bias = () if bool(weight_tensor(program, spec).all()) else bias
        elif always(mask) is True:
            bias = ()
    scale = 1 / math.sqrt(shape_of(query)[-1]) if scale is None else float(scale)
    return Attention(query, key, value, bias, scale, bool(given["is_causal"]), node)


def _check(match: Attention) -> None:
    """Raise NoMatch if one attention op would not compute the same."""
    wanted = dtype_of(match.query)
    for node in (match.key, match.value, *match.bias):
        if dtype_of(node) not in (wanted, torch.bool):
            found, name = dtype_text(dtype_of(node)), dtype_text(wanted)
            raise NoMatch(
                node, f"{node.name} is {found} and the query {name}: run unify-dtype first"
            )
    for name in ("query", "key", "value"):
        node = getattr(match, name)
        shape = shape_of(node)
        if len(shape) != 4:
            raise NoMatch(node, f"the {name} has rank {len(shape)}, expected 4")
        if not (isinstance(shape[1], int) and isinstance(shape[3], int)):
            raise NoMatch(node, f"heads {shape[1]} and head size {shape[3]} have to be fixed")
    # The op broadcasts key and value heads over the query's, and a bias over the scores.
    query, key, value = map(shape_of, (match.query, match.key, match.value))
    if _broadcasts(key[0], query[0]) or _broadcasts(value[0], query[0]):
        raise NoMatch(match.key, "query, key and value have different batch sizes")
    if key[1] != value[1] or query[1] % key[1] or _broadcasts(key[2], value[2]):
        raise NoMatch(match.value, "key and value have different heads or tokens")
    for bias in match.bias:
        sizes = shape_of(bias)
        if not 2 <= len(sizes) <= 4:
            raise NoMatch(bias, f"the bias has rank {len(sizes)}, expected 2 to 4")
        scores = (*query[:3], key[2])[-len(sizes) :]
        pairs = zip(scores, sizes, strict=True)
        if any(same_size(score, 1) and not same_size(size, 1) for score, size in pairs):
            raise NoMatch(bias, "the scores are broadcast to the bias")


def _broadcasts(size: Any, other: Any) -> bool:
    return same_size(size, 1) is not same_size(other, 1)


def _fuse(program: ProgramView, match: Attention, to: str) -> str:
    """Insert the op; return a note on its layout."""
    heads = shape_of(match.query)[1]
    key, value = unrepeated(match.key), unrepeated(match.value)
    if shape_of(key)[1] != shape_of(value)[1]:
        key, value = match.key, match.value
    kv_heads = shape_of(key)[1]
    flat = [split_heads(node) for node in (match.query, key, value)]
    joined = joined_output(match.out) if to == "attention" and all(flat) else None
    out = match.out if joined is None else joined
    inputs = [match.query, key, value] if joined is None else flat
    with program.graph.inserting_before(out):
        bias, scale = _sum(program, match), match.scale
        if scale <= 0:  # kernels take none, and some take 0 for the usual one
            inputs[0] = insert(program.graph, aten.mul.Tensor, (inputs[0], scale), like=match.out)
            scale = 1.0
        if to == "attention":
            op = torch.ops.enginecast.attention.default
            args = (*inputs, bias, heads, kv_heads, scale, match.causal)
            fused = insert(program.graph, op, args, like=out)
        else:
            how = {"scale": scale, "enable_gqa": heads != kv_heads}
            sdpa = aten.scaled_dot_product_attention.default
            args = (*inputs, bias, 0.0, match.causal)
            fused = insert(program.graph, sdpa, args, how, like=out)
    # The op belongs to the attention, whichever line joins the heads.
    take_place(fused, match.out)
    loosen_views(out)
    out.replace_all_uses_with(fused)
    return "heads first" if joined is None else "tokens first"


def _sum(program: ProgramView, match: Attention) -> Node | None:
    """One bias; two are added once (an encoder's layers share them, so equal sums merge later)."""
    if not match.bias or not match.note:
        return match.bias[0] if match.bias else None
    graph, like = program.graph, match.bias[0]
    wanted = dtype_of(match.query)
    total, *others = (
        insert(graph, aten.to.dtype, (bias, wanted), like=bias)
        if dtype_of(bias) == torch.bool
        else bias
        for bias in match.bias
    )
    for bias in others:
        total = insert(graph, aten.add.Tensor, (total, bias), like=bias)
    if not any(_may_hide_rows(program, bias) for bias in match.bias):
        return total
    largest = insert(graph, aten.amax.default, (total, [-1], True), like=like)
    hidden = insert(graph, aten.eq.Scalar, (largest, -math.inf), like=like)
    return insert(graph, aten.masked_fill.Scalar, (total, hidden, math.nan), like=like)


def _may_hide_rows(program: ProgramView, bias: Node) -> bool:
    """Whether a row of a bias may be -inf throughout: softmax gives NaN there, and attention zeros.

    Products and sums are assumed finite.
    """
    specs, waiting, seen = weight_specs(program), [bias], {bias}
    while waiting:
        node = waiting.pop()
        if -math.inf in node.args:
            return True
        if node.op == "placeholder" and is_float(node):
            spec = specs.get(node.name)
            if spec is None:
                return True
            held = None if spec.kind is InputKind.PARAMETER else weight_tensor(program, spec)
            if held is not None and held.numel() and bool(held.isneginf().all(-1).any()):
                return True
        if not has(node, Trait.HEAVY, Trait.REDUCES):
            waiting += [source for source in node.all_input_nodes if source not in seen]
            seen.update(waiting)
    return False
