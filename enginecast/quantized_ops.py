"""Operators of our own for quantised values, between the passes and a target.

    %s: f32[1, 7, 1] = enginecast.dynamic_scale(%x, fp8, True)
    %q: fp8[1, 7, 64] = enginecast.quantize(%x, %s, fp8)
    %y: bf16[1, 7, 128] = enginecast.quantized_linear(%q, %s, %w8, %ws, %bias, bf16)

`quantize` saturates: the cast to fp8 alone gives NaN above 464 in torch 2.12 and older, and 448 in
2.13, so nothing here relies on it (torch/headeronly/util/Float8_e4m3fn.h).  What reads quantised
weights is tagged as nondeterministic, which is what keeps the constant folding of a backend from
turning them back into large floats.

Each op also takes float dtypes in the place of a quantised one: then it rounds nothing, which is
the same program without its quantisation.
"""

import torch
from torch import Tensor
from torch.nn import functional

LIMITS: dict[torch.dtype, float] = {
    torch.float8_e4m3fn: 448.0,
    torch.float8_e4m3fnuz: 240.0,
    torch.float8_e5m2: 57344.0,
    torch.int8: 127.0,
}
"""Largest value of each quantised dtype that is used; int8 is symmetric, without -128."""

SMALLEST_SCALE = 2.0**-40
"""Floor of a scale: a channel of zeros has one, too, and no backend takes a scale of 0."""

_UNFOLDABLE = (torch.Tag.nondeterministic_seeded,)


@torch.library.custom_op("enginecast::dynamic_scale", mutates_args=())
def dynamic_scale(x: Tensor, dtype: torch.dtype, per_row: bool) -> Tensor:
    """The scale with which the largest value of x, or of each row, just fits a dtype.

    Args:
        x: [..., K], any float dtype.
        dtype: quantised dtype of `LIMITS`.
        per_row: one scale for each vector along the last dim, else one for all of x.

    Returns:
        fp32, [..., 1] or [] ; at least `SMALLEST_SCALE`.  Not finite where x is not: what is
        broken stays visible.
    """
    largest = x.abs().amax(-1, keepdim=True) if per_row else x.abs().amax()
    return (largest.float() / LIMITS.get(dtype, 1.0)).clamp(min=SMALLEST_SCALE)


@dynamic_scale.register_fake
def _dynamic_scale_fake(x: Tensor, dtype: torch.dtype, per_row: bool) -> Tensor:
    shape = (*x.shape[:-1], 1) if per_row else ()
    return x.new_empty(shape, dtype=torch.float32)


@torch.library.custom_op("enginecast::quantize", mutates_args=())
def quantize(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """x / scale, clamped to the dtype's range and rounded to nearest, ties to even.

    Args:
        x: any float dtype.
        scale: fp32, broadcastable to x: [] or [..., 1] per row ([N, 1] for a weight [N, K]).
        dtype: quantised dtype of `LIMITS`; a float dtype: neither clamped nor rounded.

    Returns:
        Shape of x, `dtype`.
    """
    scaled = x.float() / scale
    limit = LIMITS.get(dtype)
    if limit is None:
        return scaled.to(dtype)
    if not dtype.is_floating_point:
        scaled = scaled.round()
    return scaled.clamp(-limit, limit).to(dtype)


@quantize.register_fake
def _quantize_fake(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return x.new_empty(x.shape, dtype=dtype)


@torch.library.custom_op("enginecast::dequantize", mutates_args=(), tags=_UNFOLDABLE)
def dequantize(q: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """q * scale, computed in fp32 and rounded to `dtype`.

    Args:
        q: what `quantize` gave.
        scale: fp32, broadcastable to q.
        dtype: a float dtype.

    Returns:
        Shape of q, `dtype`.
    """
    return (q.float() * scale).to(dtype)


@dequantize.register_fake
def _dequantize_fake(q: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return q.new_empty(q.shape, dtype=dtype)


@torch.library.custom_op("enginecast::quantized_linear", mutates_args=(), tags=_UNFOLDABLE)
def quantized_linear(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """The product of quantised values, summed in fp32 (int8: exactly), then scaled.

    Args:
        x: [..., K], quantised.
        x_scale: fp32, [] or [..., 1].
        weight: [N, K], quantised.
        weight_scale: fp32, [] or [N, 1].
        bias: [N], any float dtype; added in fp32.
        dtype: float dtype of the result.

    Returns:
        [..., N], `dtype`.
    """
    wide = torch.float64 if x.dtype == torch.int8 else torch.float32
    product = functional.linear(x.to(wide), weight.to(wide)).float()
    found = product * x_scale * weight_scale.reshape(-1)
    return (found if bias is None else found + bias.float()).to(dtype)


@quantized_linear.register_fake
def _quantized_linear_fake(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]), dtype=dtype)


@torch.library.custom_op("enginecast::blockwise_linear", mutates_args=(), tags=_UNFOLDABLE)
def blockwise_linear(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    bits: int,
    activations: bool,
) -> Tensor:
    """A linear whose weight has one scale for each block along K: com.microsoft MatMulNBits.

    Args:
        x: [..., K], any float dtype.
        weight: [N, K] int8; for 4 bits within -8..7.
        weight_scale: fp32, [N, K / block size].
        bias: [N], dtype of x.
        bits: 4 or 8: of a stored weight.
        activations: whether blocks of x are rounded to int8, too (accuracy level 4 of the op).

    Returns:
        [..., N], dtype of x.
    """
    block = weight.shape[1] // weight_scale.shape[1]
    wide = weight.float().unflatten(1, (-1, block)) * weight_scale.unsqueeze(-1)
    rows = x.float()
    if activations:
        blocks = rows.unflatten(-1, (-1, block))
        scale = (blocks.abs().amax(-1, keepdim=True) / 127).clamp(min=SMALLEST_SCALE)
        rows = ((blocks / scale).round() * scale).flatten(-2)
    found: Tensor = functional.linear(rows, wide.flatten(1))
    if bias is not None:
        found = found + bias.float()
    return found.to(x.dtype)


@blockwise_linear.register_fake
def _blockwise_linear_fake(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    bits: int,
    activations: bool,
) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


@torch.library.custom_op("enginecast::quantize_blocks", mutates_args=())
def quantize_blocks(x: Tensor, scale: Tensor, bits: int) -> Tensor:
    """A weight rounded to int8 by blocks along its last dim, each with a scale of its own.

    Args:
        x: [N, K].
        scale: fp32, [N, K / block size].
        bits: 4 (within -7..7) or 8 (within -127..127).

    Returns:
        int8, [N, K].
    """
    limit = 2.0 ** (bits - 1) - 1
    blocks = x.float().unflatten(1, (scale.shape[1], -1)) / scale.unsqueeze(-1)
    rounded: Tensor = blocks.round().clamp(-limit, limit).to(torch.int8)
    return rounded.flatten(1)


@quantize_blocks.register_fake
def _quantize_blocks_fake(x: Tensor, scale: Tensor, bits: int) -> Tensor:
    return x.new_empty(x.shape, dtype=torch.int8)
