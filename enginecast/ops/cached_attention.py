"""Attention that appends to a cache of keys and values."""

from typing import Any

import torch
from torch import Tensor

from enginecast.ops.attention import attention
from enginecast.ops.traits import Trait, operator


def _fake(
    query: Tensor, key: Tensor, value: Tensor, past_key: Tensor, past_value: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        query.new_empty((*query.shape[:3], value.shape[3])),
        _longer(past_key, key),
        _longer(past_value, value),
    )


def _longer(past: Tensor, new: Tensor) -> Tensor:
    return new.new_empty((*new.shape[:2], past.shape[2] + new.shape[2], new.shape[3]))


@operator(Trait.HEAVY, fake=_fake, form_of="onnx")
def cached_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    past_key: Tensor,
    past_value: Tensor,
    bias: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Scaled dot-product attention to past and new keys: ONNX Attention (opset 23) with a past.

    Args:
        query: [batch, heads, tokens, size].
        key: [batch, kv heads, tokens, size]; heads is a multiple of kv heads.
        value: like key; the size of a head may be another.
        past_key: [batch, kv heads, past, size]; past may be 0.
        past_value: like past_key, with the size of value.
        bias: added to the scores, or bool (True: may attend):
            [batch or 1, heads or 1, tokens, past + tokens].
        scale: multiplies the scores.

    Returns:
        [batch, heads, tokens, size of value], then keys and values [batch, kv heads, past + tokens,
        size]: the past, and then the new ones.
    """
    keys = torch.cat([past_key, key], 2)
    values = torch.cat([past_value, value], 2)
    heads, kv_heads = query.shape[1], key.shape[1]
    return attention(query, keys, values, bias, heads, kv_heads, scale, False), keys, values
