"""Operators of our own that stand in a program between the passes and a target.

Each has a plain torch implementation, so a program that holds them still runs, in any float dtype,
and can be compared with eager.  Importing this module registers them; it is imported where a pass
or an exporter needs them.
"""

import torch
from torch import Tensor


def _heads_first(x: Tensor, heads: int) -> Tensor:
    """[batch, tokens, heads * size] -> [batch, heads, tokens, size]; 4-D input is heads first
    already.
    """
    if x.dim() == 4:
        return x
    split: Tensor = x.unflatten(-1, (heads, x.shape[-1] // heads))
    return split.transpose(1, 2)


@torch.library.custom_op("enginecast::attention", mutates_args=())
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
    out = torch.nn.functional.scaled_dot_product_attention(
        _heads_first(query, heads),
        _heads_first(key, kv_heads),
        _heads_first(value, kv_heads),
        attn_mask=bias,
        is_causal=causal,
        scale=scale,
        enable_gqa=heads != kv_heads,
    )
    # An op may not return a view of its inputs, nor change strides with the kernel that sdpa picks.
    return (out if query.dim() == 4 else out.transpose(1, 2).flatten(2)).contiguous()


@attention.register_fake
def _attention_fake(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    heads: int,
    kv_heads: int,
    scale: float,
    causal: bool,
) -> Tensor:
    if query.dim() == 4:
        return query.new_empty((*query.shape[:3], value.shape[-1]))
    return query.new_empty((*query.shape[:2], value.shape[-1] // kv_heads * heads))


@torch.library.custom_op("enginecast::skip_rms_norm", mutates_args=())
def skip_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, epsilon: float
) -> tuple[Tensor, Tensor]:
    """Add a residual and normalise the sum: com.microsoft SkipSimplifiedLayerNormalization.

    Args:
        x: [batch, tokens, size] or [tokens, size].
        residual: same shape and dtype as x.
        weight: [size], same dtype as x.
        epsilon: added to the mean of squares.

    Returns:
        rms_norm(x + residual) and x + residual, both of x's shape and dtype.
    """
    total = (x + residual).contiguous()  # strides that do not depend on the kernel
    normalised = torch.nn.functional.rms_norm(total, [total.shape[-1]], weight, epsilon)
    return normalised.contiguous(), total


@skip_rms_norm.register_fake
def _skip_rms_norm_fake(
    x: Tensor, residual: Tensor, weight: Tensor, epsilon: float
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape)
