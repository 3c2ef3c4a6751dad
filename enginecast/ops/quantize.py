"""Values to quantized ones, and back.

    %s: f32[1, 7, 1] = enginecast.dynamic_scale(%x, fp8, True)
    %q: fp8[1, 7, 64] = enginecast.quantize(%x, %s, fp8)
    %y: bf16[1, 7, 128] = enginecast.quantized_linear(%q, %s, %w8, %ws, %bias, bf16)

`quantize` saturates: the cast to fp8 alone gives NaN above 464 in torch 2.12 and older, and 448 in
2.13, so nothing here relies on it (torch/headeronly/util/Float8_e4m3fn.h).

Each op also takes float dtypes in the place of a quantized one: then it rounds nothing, which is
the same program without its quantization.
"""

import torch
from torch import Tensor

from enginecast.ops.traits import Trait, operator

E2M1 = torch.float4_e2m1fn_x2
"""Names the format, whose values torch has in pairs alone: they are held in e4m3fn, which has each
of them."""
E8M0 = torch.float8_e8m0fnu
"""Powers of two: the scales of OCP's microscaling formats."""
LIMITS: dict[torch.dtype, float] = {
    E2M1: 6.0,
    E8M0: 2.0**127,
    torch.float8_e4m3fn: 448.0,
    torch.float8_e4m3fnuz: 240.0,
    torch.float8_e5m2: 57344.0,
    torch.int8: 127.0,
    torch.int32: 2.0**30,
}
"""Largest value of each quantized dtype that is used; int8 is symmetric, without -128, and int32,
which holds a bias, leaves room for the sum that it is added to."""

SMALLEST_SCALE = 2.0**-40
"""Floor of a scale: a channel of zeros has one, too, and no backend takes a scale of 0."""

ZERO = 128
"""What stands for 0 in unsigned values."""


def held(dtype: torch.dtype) -> torch.dtype:
    """What holds the values of a quantized dtype, one element for each."""
    return torch.float8_e4m3fn if dtype == E2M1 else dtype


def _scale_fake(x: Tensor, dtype: torch.dtype, per_row: bool) -> Tensor:
    return x.new_empty((*x.shape[:-1], 1) if per_row else (), dtype=torch.float32)


@operator(Trait.FULL_RANGE, fake=_scale_fake)
def dynamic_scale(x: Tensor, dtype: torch.dtype, per_row: bool) -> Tensor:
    """The scale with which the largest value of x, or of each row, just fits a dtype.

    Args:
        x: [..., K], any float dtype.
        dtype: quantized dtype of `LIMITS`.
        per_row: one scale for each vector along the last dim, else one for all of x.

    Returns:
        fp32, [..., 1] or [] ; at least `SMALLEST_SCALE`.  Not finite where x is not: what is
        broken stays visible.
    """
    largest = x.abs().amax(-1, keepdim=True) if per_row else x.abs().amax()
    return (largest.float() / LIMITS.get(dtype, 1.0)).clamp(min=SMALLEST_SCALE)


@operator(Trait.FULL_RANGE, fake=lambda x, scale, dtype: x.new_empty(x.shape, dtype=held(dtype)))
def quantize(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """x / scale, clamped to the dtype's range and rounded to nearest, ties to even.

    Args:
        x: any float dtype.
        scale: fp32, broadcastable to x: [] or [..., 1] per row ([N, 1] for a weight [N, K]).
        dtype: quantized dtype of `LIMITS`; a float dtype: neither clamped nor rounded.

    Returns:
        Shape of x, `dtype`, or what holds it (`held`).
    """
    scaled = x.float() / scale
    limit = LIMITS.get(dtype)
    if limit is None:
        return scaled.to(dtype)
    if dtype == E2M1:
        scaled = _to_e2m1(scaled)
    elif not dtype.is_floating_point:
        scaled = scaled.round()
    return scaled.clamp(-limit, limit).to(held(dtype))


def _to_e2m1(x: Tensor) -> Tensor:
    """The nearest of 0, 0.5, 1, 1.5, 2, 3, 4, 6 and beyond: steps of half a unit below 2, of a unit
    below 4, of two from there on.  A tie goes to the even multiple of a step, whose last bit is 0.
    """
    size = x.abs()
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    return (x / step).round() * step


@operator(Trait.FULL_RANGE, fake=torch.empty_like)
def power_of_two(x: Tensor) -> Tensor:
    """The smallest power of two that is not below x.

    Args:
        x: fp32, above 0 and normal.

    Returns:
        fp32, shape of x.
    """
    exponent = 0x7F80_0000
    return ((x.view(torch.int32) + 0x007F_FFFF) & exponent).view(torch.float32)


@operator(Trait.UNFOLDABLE, fake=lambda q, scale, dtype: q.new_empty(q.shape, dtype=dtype))
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


@operator(
    Trait.FULL_RANGE,
    fake=lambda x, *_: x.new_empty(x.shape, dtype=torch.uint8),
    form_of="onnx",
)
def quantize_unsigned(x: Tensor, scale: Tensor, zeros: Tensor | None) -> Tensor:
    """`enginecast.quantize(x, scale, int8)` plus 128, as uint8: what the CPU multiplies fast.

    Args:
        x: [..., K], any float dtype.
        scale: fp32, [] or [..., 1].
        zeros: uint8, 128 beside each scale [..., 1], which is that of its row's largest value, so
            that nothing is to be clamped; None: there is one scale.

    Returns:
        uint8, shape of x; within 1..255.
    """
    rounded = (x.float() / scale).round().clamp(-127, 127)
    return (rounded + ZERO).to(torch.uint8)


@operator(
    Trait.FULL_RANGE, fake=lambda x, scale: x.new_empty(x.shape, dtype=torch.int8), form_of="onnx"
)
def quantize_linear(x: Tensor, scale: Tensor) -> Tensor:
    """int8 as ONNX's QuantizeLinear rounds to it: `quantize`, but for what lies below its range,
    which becomes -128.

    Args:
        x: any float dtype.
        scale: fp32, fp16 or bf16, [].

    Returns:
        int8, shape of x.
    """
    return (x.float() / scale.float()).round().clamp(-128, 127).to(torch.int8)


@operator(
    Trait.UNFOLDABLE,
    fake=lambda q, scale, axis, dtype: q.new_empty(q.shape, dtype=dtype),
    form_of="onnx",
)
def dequantize_axis(q: Tensor, scale: Tensor, axis: int, dtype: torch.dtype) -> Tensor:
    """`enginecast.dequantize` with one scale for each index of one dimension, or for all.

    Args:
        q: quantized.
        scale: [size of that dimension] or []; fp32, or `dtype` where that holds it.
        axis: the dimension.
        dtype: of the result.

    Returns:
        Shape of q, `dtype`.
    """
    shape = [1] * q.dim()
    if scale.dim():
        shape[axis] = -1
    return (q.float() * scale.float().reshape(shape)).to(dtype)
