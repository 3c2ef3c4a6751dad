"""Attention whose scores and weights are stored in the low dtype, as unfused kernels do."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from enginecast.verify.emulate_profiles import How, Profile
from enginecast.verify.emulate_rounding import product, softmax_steps


def sdpa(how: How, profile: Profile) -> Callable[..., Tensor]:
    """aten.scaled_dot_product_attention."""

    def kernel(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        bias: Tensor | None = None,
        dropout: float = 0.0,
        causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
        **named: Any,
    ) -> Tensor:
        bias = named.get("attn_mask", bias)
        causal = named.get("is_causal", causal)
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        return _attend(query, key, value, bias, scale, causal, how, profile)

    return kernel


def attention(how: How, profile: Profile) -> Callable[..., Tensor]:
    """enginecast.attention."""

    def kernel(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        bias: Tensor | None,
        heads: int,
        kv_heads: int,
        scale: float,
        causal: bool,
    ) -> Tensor:
        first, second, third = (
            x if x.dim() == 4 else x.unflatten(-1, (count, -1)).transpose(1, 2)
            for x, count in ((query, heads), (key, kv_heads), (value, kv_heads))
        )
        found = _attend(first, second, third, bias, scale, causal, how, profile)
        return (found if query.dim() == 4 else found.transpose(1, 2).flatten(2)).contiguous()

    return kernel


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    scale: float,
    causal: bool,
    how: How,
    profile: Profile,
) -> Tensor:
    """Attention whose scores and weights are stored.

    Args:
        query: [..., heads, tokens, size].
        key: with as many heads or fewer, which are repeated; so are those of value.
    """
    groups = query.shape[-3] // key.shape[-3] if query.dim() > 2 else 1
    if groups > 1:
        key, value = (x.repeat_interleave(groups, -3) for x in (key, value))
    dtype = query.dtype
    scores = (query.float() @ key.float().mT * scale).to(dtype)  # scale is the product's alpha
    if how == "stored":
        weights = _masked_weights(scores.float(), bias, causal, lambda s: s.softmax(-1)).to(dtype)
        return (weights.float() @ value.float()).to(dtype)
    steps = _masked_weights(scores, bias, causal, lambda s: softmax_steps(s, -1, profile))
    return product(steps, value, profile.matmul.how)


def _masked_weights(
    scores: Tensor, bias: Tensor | None, causal: bool, softmax: Callable[[Tensor], Tensor]
) -> Tensor:
    """A row that may attend to nothing has weights of zero, as torch's attention has."""
    if causal:
        allowed = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        scores = scores.masked_fill(~allowed, -torch.inf)
    if bias is not None:
        is_bool = bias.dtype is torch.bool
        scores = scores.masked_fill(~bias, -torch.inf) if is_bool else scores + bias
    nothing = (scores == -torch.inf).all(-1, keepdim=True)
    return softmax(scores).masked_fill(nothing, 0.0)
