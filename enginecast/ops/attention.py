"""Attention over whole heads."""

from typing import Any

import torch
from torch import Tensor

from enginecast.ops.traits import Trait, operator


def _heads_first(x: Tensor, heads: int) -> Tensor:
    """[batch, tokens, heads * size] -> [batch, heads, tokens, size]; 4-D input is so already."""
    if x.dim() == 4:
        return x
    split: Tensor = x.unflatten(-1, (heads, x.shape[-1] // heads))
    return split.transpose(1, 2)


def _fake(query: Tensor, key: Tensor, value: Tensor, bias: Any, heads: int, *rest: Any) -> Tensor:
    if query.dim() == 4:
        return query.new_empty((*query.shape[:3], value.shape[-1]))
    return query.new_empty((*query.shape[:2], value.shape[-1] // rest[0] * heads))


@operator(Trait.HEAVY, fake=_fake)
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    heads: int,
    kv_heads: int,
    scale: float,
    causal: bool,
) -> Tensor:
    """Scaled dot-product attention over whole heads, as ONNX Attention (opset 23) defines it.

    Args:
        query: [batch, tokens, heads * size], or heads first: [batch, heads, tokens, size].
        key: like query, with `kv_heads` heads and the key length.
        value: like key.
        bias: added to the scores, or bool (True: may attend); broadcastable to
            [batch, heads, tokens, key tokens].
        heads: query heads, a multiple of `kv_heads` (grouped-query attention).
        kv_heads: key and value heads.
        scale: multiplies the scores.
        causal: each token attends to itself and to earlier ones only.

    Returns:
        In the layout of query, with the head size of value.
    """
    query_heads, key_heads = _heads_first(query, heads), _heads_first(key, kv_heads)
    if causal and bias is not None:  # torch 2.14 takes one of them alone
        earlier = bias.new_ones(query_heads.shape[-2], key_heads.shape[-2], dtype=torch.bool).tril()
        is_mask = bias.dtype == torch.bool
        bias = bias & earlier if is_mask else bias.masked_fill(~earlier, -torch.inf)
        causal = False
    out = torch.nn.functional.scaled_dot_product_attention(
        query_heads,
        key_heads,
        _heads_first(value, kv_heads),
        attn_mask=bias,
        is_causal=causal,
        scale=scale,
        enable_gqa=heads != kv_heads,
    )
    # An op may not return a view of its inputs, nor change strides with the kernel that sdpa picks.
    return (out if query.dim() == 4 else out.transpose(1, 2).flatten(2)).contiguous()
