"""Our ops: right values in both layouts, and fakes that tell the truth."""

import math

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

import enginecast.ops  # noqa: F401 - registers our ops

attention = torch.ops.enginecast.attention.default
skip_rms_norm = torch.ops.enginecast.skip_rms_norm.default


def heads_first(x: Tensor, heads: int) -> Tensor:
    split: Tensor = x.unflatten(-1, (heads, -1))
    return split.transpose(1, 2)


def by_hand(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float, causal: bool
) -> Tensor:
    """Attention over heads-first fp64 tensors, step by step."""
    groups = query.shape[1] // key.shape[1]
    key, value = (t.repeat_interleave(groups, 1) for t in (key, value))
    scores = query @ key.transpose(2, 3) * scale
    if causal:
        allowed = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        scores = scores.masked_fill(~allowed, -math.inf)
    if bias is not None and bias.dtype == torch.bool:
        scores = scores.masked_fill(~bias, -math.inf)
    elif bias is not None:
        scores = scores + bias
    return scores.softmax(-1) @ value


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("masking", ["none", "bias", "bool", "causal"])
def test_attention_in_both_layouts(masking: str, kv_heads: int) -> None:
    heads, tokens, size = 4, 7, 6
    query = torch.randn(2, tokens, heads * size, dtype=torch.float64)
    key, value = torch.randn(2, 2, tokens, kv_heads * size, dtype=torch.float64)
    bias: Tensor | None = None
    if masking == "bias":
        bias = torch.randn(1, heads, tokens, tokens, dtype=torch.float64)
    if masking == "bool":
        bias = torch.ones(2, 1, tokens, tokens, dtype=torch.bool).tril(2)
    split = heads_first(query, heads), heads_first(key, kv_heads), heads_first(value, kv_heads)
    rest = bias, heads, kv_heads, 0.3, masking == "causal"
    expected = by_hand(*split, bias, 0.3, masking == "causal")
    first = attention(*split, *rest)
    flat = attention(query, key, value, *rest)
    assert torch.allclose(first, expected, atol=1e-12)
    assert torch.allclose(flat, expected.transpose(1, 2).flatten(2), atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("layout", ["tokens first", "heads first", "strided"])
def test_fake_attention_has_the_shape_dtype_and_strides_of_the_real_one(
    layout: str, dtype: torch.dtype
) -> None:
    query, key = torch.randn(2, 5, 24).to(dtype), torch.randn(2, 9, 12).to(dtype)
    value = torch.randn(2, 9, 16).to(dtype)  # heads of another size than the key's
    if layout != "tokens first":
        query, key, value = heads_first(query, 4), heads_first(key, 2), heads_first(value, 2)
    if layout == "heads first":
        query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
    bias = torch.zeros(2, 1, 5, 9, dtype=dtype)
    opcheck(attention, (query, key, value, bias, 4, 2, 0.5, False))


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_fake_skip_norm_has_the_shape_dtype_and_strides_of_the_real_one(
    dtype: torch.dtype, strided: bool
) -> None:
    x, residual = torch.randn(2, 5, 7, 8).to(dtype)
    weight = torch.randn(8).to(dtype)
    if strided:
        x = x.transpose(0, 1).contiguous().transpose(0, 1)
    opcheck(skip_rms_norm, (x, residual, weight, 1e-6))


def test_skip_norm_returns_the_norm_and_the_sum() -> None:
    x, residual = torch.randn(2, 3, 5, 8, dtype=torch.float64)
    weight = torch.randn(8, dtype=torch.float64)
    normalized, total = skip_rms_norm(x, residual, weight, 0.1)
    assert torch.equal(total, x + residual)
    mean = total.square().mean(-1, keepdim=True)
    assert torch.allclose(normalized, total / (mean + 0.1).sqrt() * weight, atol=1e-12)


def test_fully_masked_row_is_finite_with_an_additive_bias() -> None:
    x = torch.randn(1, 5, 8)
    bias = torch.full((1, 1, 5, 5), torch.finfo(torch.float32).min)
    assert attention(x, x, x, bias, 2, 2, 0.5, False).isfinite().all()
