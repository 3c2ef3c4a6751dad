"""Attention: each reader is fast with another op."""

import math
from typing import Any

import torch
from onnxscript import opset23 as op
from torch import Tensor
from torch.fx import Node

from enginecast.exporters.onnx.ops.graph import size_of
from enginecast.exporters.onnx.ops.microsoft import multi_head_attention
from enginecast.exporters.onnx.ops.registry import (
    FORMS,
    ONNXRUNTIME,
    READERS,
    form,
    rewrite,
    torch_form,
    trace,
)
from enginecast.exporters.onnx.ops.values import ints, like
from enginecast.passes.ir.base import ProgramView
from enginecast.passes.ir.edit import (
    arguments,
    dtype_of,
    first_input,
    insert,
    same_shape,
    same_size,
    shape_of,
    weight_expressions,
    weight_value,
)
from enginecast.passes.ir.effects import aten, own
from enginecast.passes.ir.varying_sizes import may_be_zero

# torch's own, where no pass has fused it


def _broadcasts(node: Node) -> bool:
    """Whether a call of attention has other dims than batch, heads, tokens and size in common; one
    with dropout is refused later.
    """
    if node.args[4:5] not in ((), (0.0,)):
        return False
    query, key, value = (shape_of(found) for found in arguments(node)[:3])
    if {len(query), len(key), len(value)} != {4}:
        return True
    heads = key[1] if node.kwargs.get("enable_gqa") else query[1]
    wanted = [query[0], heads, *key[2:3]]
    return not (same_shape(wanted, key[:3]) and same_shape(wanted, value[:3]))


@torch_form(aten.scaled_dot_product_attention.default, when=_broadcasts)
def _spelled_out(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    dropout: float = 0.0,
    causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attention as torch defines it: a row without keys is zero."""
    if enable_gqa:
        key = key.repeat_interleave(query.size(-3) // key.size(-3), -3)
        value = value.repeat_interleave(query.size(-3) // value.size(-3), -3)
    factor = query.size(-1) ** -0.5 if scale is None else scale
    scores = query @ key.transpose(-2, -1) * factor
    if causal:
        mask = torch.ones_like(scores, dtype=torch.bool).tril()
    if mask is None:
        return scores.softmax(-1) @ value
    is_bool = mask.dtype == torch.bool
    scores = scores.masked_fill(~mask, -math.inf) if is_bool else scores + mask
    hidden = scores.amax(-1, keepdim=True) == -math.inf
    return scores.softmax(-1).masked_fill(hidden, 0.0) @ value


# What readers take: biases of full size, finite, in the dtype of the query


def _lacks_full_bias(node: Node) -> bool:
    """Whether an attention has a bias, and not one of four dims with full rows and columns."""
    bias = arguments(node)[3]
    if bias is None:
        return False
    return len(shape_of(bias)) < 4 or not same_shape(shape_of(bias)[2:], _tokens(node))


def _full_bias(program: ProgramView, node: Node) -> None:
    """ONNX Runtime's attention ops want a 4-D bias with full [tokens, key tokens]; anything less is
    refused at run time.
    """
    bias = arguments(node)[3]
    while len(shape_of(bias)) < 4:
        bias = insert(program.graph, aten.unsqueeze.default, (bias, 0), like=node)
    if not same_shape(shape_of(bias)[2:], _tokens(node)):
        sizes = [-1, -1, *_token_sizes(program, node)]
        bias = insert(program.graph, aten.expand.default, (bias, sizes), like=node)
    node.update_arg(3, bias)


def _is_unfit_for_onnxruntime(node: Node) -> bool:
    return (
        _lacks_full_bias(node) or _may_be_lowest(arguments(node)[3]) or _may_be_among_nothing(node)
    )


def _may_be_among_nothing(node: Node) -> bool:
    """Whether ONNX Runtime's Attention (1.31) may refuse a call: with no rows, queries or keys.
    MultiHeadAttention, which stands for calls without a bias, does not.
    """
    query, key, _, bias = arguments(node)[:4]
    if bias is None and len(shape_of(query)) == 3:
        return False
    return any(may_be_zero(size) for given in (query, key) for size in shape_of(given)[:-1])


def _attention_by_products(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    heads: int,
    kv_heads: int,
    scale: float,
    causal: bool,
) -> Tensor:
    def heads_first(x: Tensor, count: int) -> Tensor:
        return x if x.dim() == 4 else x.unflatten(-1, (count, -1)).transpose(1, 2)

    found = _spelled_out(
        heads_first(query, heads),
        heads_first(key, kv_heads),
        heads_first(value, kv_heads),
        bias,
        causal=causal,
        scale=scale,
        enable_gqa=heads != kv_heads,
    )
    return found if query.dim() == 4 else found.transpose(1, 2).flatten(2)


@rewrite(own.attention.default, when=_is_unfit_for_onnxruntime, readers=ONNXRUNTIME)
def _onnxruntime_attention(program: ProgramView, node: Node) -> Node | None:
    if _may_be_among_nothing(node):
        return trace(program, node, _attention_by_products)
    bias = arguments(node)[3]
    if _may_be_lowest(bias):
        node.update_arg(3, _above_lowest(program, bias, node))
    _full_bias(program, node)
    return None


def _may_be_lowest(bias: Node | None) -> bool:
    """Whether some element may be the lowest number of fp32; weights are none that mask."""
    return dtype_of(bias) == torch.float32 and bias is not None and bias.op != "placeholder"


def _above_lowest(program: ProgramView, bias: Node, node: Node) -> Node:
    """Half the lowest number for anything lower but -inf: a score that is added leaves both as they
    are.  ONNX Runtime's Attention (1.31) takes the lowest number for -inf, and a row whose keys are
    all masked so would be zeros, where torch averages the values.
    """
    graph = program.graph
    least = torch.finfo(torch.float32).min / 2
    clamped = insert(graph, aten.clamp_min.default, (bias, least), like=node)
    hidden = insert(graph, aten.eq.Scalar, (bias, -math.inf), like=node)
    return insert(graph, aten.where.self, (hidden, bias, clamped), like=node)


def _is_unfit_for_tensorrt(node: Node) -> bool:
    bias, scale, causal = arguments(node)[3], arguments(node)[6], arguments(node)[7]
    return (
        scale < 0
        or (bias is not None and dtype_of(bias) != dtype_of(node))
        or _lacks_full_bias(node)
        or bool(causal and (bias is not None or not _attends_to_itself(node)))
    )


def _attends_to_itself(node: Node) -> bool:
    """Whether there are as many keys as queries."""
    return same_size(*_tokens(node))


@rewrite(own.attention.default, when=_is_unfit_for_tensorrt, readers=["tensorrt"])
def _tensorrt_attention(program: ProgramView, node: Node) -> Node | None:
    """What TensorRT's IAttention takes (its API reference, and the parser's AttentionHelpers.cpp):

    * a mask or `causal`, never both; and `causal` says nothing of keys of another length, so both
      become a bias then;
    * a bias in the dtype of the query, or bool.  A row of the latter that is all False has no
      result by ONNX's definition (a softmax of -inf), and NaN in a row of padding spreads to all
      that read its key; so a bool becomes a bias that is finite, and such a row zeros, as in
      torch, afterwards;
    * a scale that the parser takes the root of.
    """
    query, bias, scale, causal = (arguments(node)[index] for index in (0, 3, 6, 7))
    if scale < 0:
        node.update_arg(0, insert(program.graph, aten.neg.default, (query,), like=node))
        node.update_arg(6, -scale)
    hides = _may_hide_rows(program, bias, causal)
    if causal and (bias is not None or not _attends_to_itself(node)):
        bias = _with_causal(program, node, bias)
        node.update_arg(7, False)
    if bias is None:
        return None
    node.update_arg(3, _additive(program, bias, node))
    _full_bias(program, node)
    return _without_hidden_rows(program, node, bias) if hides else None


def _may_hide_rows(program: ProgramView, mask: Node | None, causal: bool) -> bool:
    """Whether a bool mask may leave a row without a key; `causal` alone leaves it the first."""
    if dtype_of(mask) != torch.bool or mask is None:
        return False
    known = not causal and mask in weight_expressions(program)
    return not (known and bool(weight_value(program, mask).any(-1).all()))


def _without_hidden_rows(program: ProgramView, node: Node, mask: Node) -> Node:
    """The same attention, with zeros where a bool mask leaves no key."""
    graph, heads = program.graph, arguments(node)[4]
    found = insert(graph, own.attention.default, node.args, like=node, replaces=True)
    masked = insert(graph, aten.logical_not.default, (mask,), like=node)
    hidden = insert(graph, aten.all.dim, (masked, -1, True), like=node)
    while len(shape_of(hidden)) < 4:
        hidden = insert(graph, aten.unsqueeze.default, (hidden, 0), like=node)
    if len(shape_of(node)) == 4:
        return insert(graph, aten.masked_fill.Scalar, (found, hidden, 0.0), like=node)
    hidden = insert(graph, aten.transpose.int, (hidden, 1, 2), like=node)
    # One for all heads, or heads apart.
    if same_size(shape_of(hidden)[2], 1):
        hidden = insert(graph, aten.squeeze.dim, (hidden, 3), like=node)
        return insert(graph, aten.masked_fill.Scalar, (found, hidden, 0.0), like=node)
    apart = insert(graph, aten.unflatten.int, (found, -1, [heads, -1]), like=node)
    apart = insert(graph, aten.masked_fill.Scalar, (apart, hidden, 0.0), like=node)
    return insert(graph, aten.flatten.using_ints, (apart, 2), like=node)


def _with_causal(program: ProgramView, node: Node, bias: Node | None) -> Node:
    """A bias that also keeps each token from later ones."""
    graph = program.graph
    args = (first_input(node), _token_sizes(program, node))
    every = insert(graph, aten.new_ones.default, args, {"dtype": torch.bool}, like=node)
    seen = insert(graph, aten.tril.default, (every,), like=node)
    if bias is None:
        return seen
    if dtype_of(bias) == torch.bool:
        return insert(graph, aten.logical_and.default, (bias, seen), like=node)
    allowed = _additive(program, seen, node)
    bias = _additive(program, bias, node)
    return insert(graph, aten.add.Tensor, (bias, allowed), like=node)


def _additive(program: ProgramView, bias: Node, node: Node) -> Node:
    """Half the lowest number stands for False: what is added to it stays finite."""
    graph = program.graph
    wanted = dtype_of(node)
    assert wanted is not None
    if dtype_of(bias) == wanted:
        return bias
    if dtype_of(bias) != torch.bool:
        return insert(graph, aten.to.dtype, (bias, wanted), like=node)
    hidden = insert(graph, aten.logical_not.default, (bias,), like=node)
    wide = insert(graph, aten.to.dtype, (hidden, wanted), like=node)
    lowest = torch.finfo(wanted).min / 2
    return insert(graph, aten.mul.Tensor, (wide, lowest), like=node)


def _tokens(node: Node) -> tuple[Any, Any]:
    """How many tokens of the query and of the key an attention has."""
    query, key = map(shape_of, arguments(node)[:2])
    return query[_token_dim(query)], key[_token_dim(query)]


def _token_sizes(program: ProgramView, node: Node) -> list[Node | int]:
    """The same as arguments."""
    query, key = arguments(node)[:2]
    dim = _token_dim(shape_of(query))
    return [size_of(program, source, dim, node) for source in (query, key)]


def _token_dim(query: tuple[Any, ...]) -> int:
    """Where the tokens are in a query: [batch, tokens, width] or [batch, heads, tokens, size]."""
    return 1 if len(query) == 3 else 2


# In ops of ONNX


@form(own.attention.default, readers=["onnxruntime-cuda", "openvino"])
def _attention(
    query: Any,
    key: Any,
    value: Any,
    bias: Any,
    heads: int,
    kv_heads: int,
    scale: float,
    causal: bool,
) -> Any:
    """The CUDA provider has kernels of Attention (opset 23) for fp16 and bf16
    (microsoft/onnxruntime#27542, older than the oldest version taken).

    A row whose keys are all -inf is zeros, as in torch.  ONNX Runtime (1.31, CPU) takes the lowest
    number for -inf, too; legalize-onnx keeps a bias above it.
    """
    counts = {"q_num_heads": heads, "kv_num_heads": kv_heads} if len(query.shape) == 3 else {}
    return _attend(query, key, value, bias, scale=scale, is_causal=int(causal), **counts)


@form(own.attention.default, readers=["onnxruntime-cpu"])
def _attention_on_cpu(
    query: Any,
    key: Any,
    value: Any,
    bias: Any,
    heads: int,
    kv_heads: int,
    scale: float,
    causal: bool,
) -> Any:
    """Attention was measured to be the faster one with a bias, and MultiHeadAttention without."""
    if bias is None and len(query.shape) == 3 and heads == kv_heads and not causal:
        return multi_head_attention(query, key, value, num_heads=heads, scale=scale)
    return _attention(query, key, value, bias, heads, kv_heads, scale, causal)


FEW_TOKENS = 8
"""With as many of a call or fewer, heads that share keys are multiplied together."""

FEWEST_TASKS = 8
"""Products that are left to the cores then: ONNX Runtime gives each to one."""

MANY_ROWS = 4
"""Rows of a batch that are counted on, where there are as many or more."""


@form(own.cached_attention.default, readers=["onnxruntime-cpu"])
def _cached_attention(
    query: Any,
    key: Any,
    value: Any,
    past_key: Any,
    past_value: Any,
    bias: Any,
    scale: float,
) -> tuple[Any, Any, Any]:
    """ONNX Runtime's Attention (1.31, CPU) multiplies head by head, and so reads the keys of a
    group again for each of its heads.  With few tokens that is what takes the time, so heads that
    share keys become tokens of one head, and queries [batch, kv heads * heads apart, heads together
    * tokens, size].  A prompt is read faster with heads apart, and the size of a call decides.
    """
    heads, kv_heads = query.shape[1], key.shape[1]
    apart = _heads_apart(query, kv_heads, heads // kv_heads, bias)
    if apart is None:
        found = op.Attention(query, key, value, bias, past_key, past_value, scale=scale)
        return found[0], found[1], found[2]
    rows = op.Mul(apart, ints(kv_heads))
    split = op.Concat(ints(0), rows, ints(-1, query.shape[3]), axis=0)  # 0: as it is
    if bias is not None:
        keys = op.Concat(ints(-1), op.Shape(bias, start=3, end=4), axis=0)
        if bias.shape[1] == 1:
            together = op.Div(ints(heads // kv_heads), apart)
            times = op.Concat(ints(1, 1), together, ints(1, 1), axis=0)
            bias = op.Expand(op.Unsqueeze(bias, ints(2)), times)
            bias = op.Reshape(bias, op.Concat(ints(0, 1), keys, axis=0))
        else:
            bias = op.Reshape(bias, op.Concat(ints(0), rows, keys, axis=0))
    found = op.Attention(
        op.Reshape(query, split), key, value, bias, past_key, past_value, scale=scale
    )
    joined = op.Reshape(found[0], ints(0, heads, -1, value.shape[3]))
    return joined, found[1], found[2]


def _heads_apart(query: Any, kv_heads: int, group: int, bias: Any) -> Any:
    """How many heads of a group are multiplied one by one: a tensor [1] of int64; None: all of
    them, whatever the call.

    Which rows there are in a call decides no more than whether there are `MANY_ROWS`, so that a
    verification meets each form.
    """
    counts = [count for count in range(1, group + 1) if group % count == 0]
    alone, many = (
        next((n for n in counts if rows * kv_heads * n >= FEWEST_TASKS), group)
        for rows in (1, MANY_ROWS)
    )
    if many == group:
        return None
    # The mask is one for all layers, and so are the nodes that ask for its sizes.
    tokens = op.Shape(query, start=2, end=3) if bias is None else op.Shape(bias, start=2, end=3)
    found = ints(many)
    if alone != many:
        of_mask = bias is not None and bias.shape[0] != 1
        rows = op.Shape(bias if of_mask else query, start=0, end=1)
        found = op.Where(op.GreaterOrEqual(rows, ints(MANY_ROWS)), found, ints(alone))
    return op.Where(op.LessOrEqual(tokens, ints(FEW_TOKENS)), found, ints(group))


for _reader in READERS:
    if _reader != "onnxruntime-cpu":
        FORMS[_reader].refuse(
            own.cached_attention.default, reason="append-cache makes it for ONNX Runtime's CPU"
        )


@form(own.attention.default, readers=["tensorrt"])
def _attention_of_heads(
    query: Any,
    key: Any,
    value: Any,
    bias: Any,
    heads: int,
    kv_heads: int,
    scale: float,
    causal: bool,
) -> Any:
    """TensorRT's IAttention takes heads first; so they are split here, as its parser would (since
    10.14, onnx/onnx-tensorrt#1043, AttentionHelpers.cpp).  Its heads are of one size: zeros make
    them so, which add nothing to a score, and columns that are left out again.
    """
    is_flat = len(query.shape) == 3
    # TensorRT-RTX 1.7.1 ends in a segmentation fault where a query is its key.
    zero = like(query, 0.0) if query is key else None
    size = query.shape[-1] // (heads if is_flat else 1)
    given = value.shape[-1] // (kv_heads if is_flat else 1)
    # A table of positions fixes the number of keys that it is added to, and of no values: said of
    # both, for TensorRT compares what it knows.
    lengths = {found.shape[1 if is_flat else 2] for found in (key, value)}
    known = next((size for size in lengths if isinstance(size, int)), 0) if len(lengths) > 1 else 0
    if is_flat:
        query = _heads_first(query, heads)
        key, value = (_heads_first(found, kv_heads, known) for found in (key, value))
    elif known:
        key, value = (op.Reshape(found, ints(0, 0, known, 0)) for found in (key, value))
    if zero is not None:
        query = op.Add(query, zero)
    if size < given:
        query, key = (_widened(found, given - size) for found in (query, key))
    elif given < size:
        value = _widened(value, size - given)
    found = _attend(query, key, value, bias, scale=scale, is_causal=int(causal))
    if given < size:
        found = op.Slice(found, ints(0), ints(given), ints(-1))
    if not is_flat:
        return found
    flat = ints(0, 0, -1)
    return op.Reshape(op.Transpose(found, perm=[0, 2, 1, 3]), flat)


def _attend(*inputs: Any, **attributes: Any) -> Any:
    results = op.Attention(*inputs, **attributes)
    return results[0] if isinstance(results, tuple | list) else results


def _widened(x: Any, columns: int) -> Any:
    """With so many columns of zeros."""
    return op.Pad(x, ints(0, columns), None, ints(-1))


def _heads_first(x: Any, heads: int, tokens: int = 0) -> Any:
    """[batch, tokens, heads * size] -> [batch, heads, tokens, size]."""
    sizes = [0, tokens, heads, x.shape[2] // heads]  # 0: as it is
    return op.Transpose(op.Reshape(x, ints(*sizes)), perm=[0, 2, 1, 3])
