"""Convolutions of quantized values, and what stands between them.

    %q: u8[1, 64, 56, 56] = enginecast.quantize_affine(%x, %xs, 113, u8)
    %y: u8[1, 64, 56, 56] = enginecast.quantized_conv(%q, %xs, 113, %w8, %ws, %b, ..., %ys, 0, ...)
    %z: f32[1, 64, 56, 56] = enginecast.dequantize_affine(%y, %ys, 0, f32)

Values are unsigned, with a scale and a number that stands for 0, both known beforehand: what a
rectifier leaves has all 256 steps.  Weights are signed and symmetric.

Each op also takes floats in the place of integers, as those of `quantize` do: values over their
scale, plus what stands for 0, neither rounded nor held within the range.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from enginecast.ops.traits import Trait, operator

LARGEST = 255
"""Of an unsigned value."""
_CONVS = {1: functional.conv1d, 2: functional.conv2d, 3: functional.conv3d}


def _rounded(scaled: Tensor, zero: int, dtype: torch.dtype) -> Tensor:
    if dtype.is_floating_point:
        return (scaled + zero).to(dtype)
    return (scaled.round() + zero).clamp(0, LARGEST).to(dtype)


@operator(Trait.FULL_RANGE, fake=lambda x, scale, zero, dtype: torch.empty_like(x, dtype=dtype))
def quantize_affine(x: Tensor, scale: Tensor, zero: int, dtype: torch.dtype) -> Tensor:
    """x / scale, rounded to nearest, ties to even, plus `zero`, within 0..255.

    Args:
        x: any float dtype.
        scale: fp32, [].
        zero: what stands for 0; 0..255.
        dtype: uint8; a float dtype: neither rounded nor clamped.

    Returns:
        Shape of x, `dtype`.
    """
    return _rounded(x.float() / scale, zero, dtype)


@operator(Trait.UNFOLDABLE, fake=lambda q, scale, zero, dtype: torch.empty_like(q, dtype=dtype))
def dequantize_affine(q: Tensor, scale: Tensor, zero: int, dtype: torch.dtype) -> Tensor:
    """(q - zero) * scale, computed in fp32 and rounded to `dtype`.

    Args:
        q: what `quantize_affine` or `quantized_conv` gave, with the same `scale` and `zero`.
        scale: fp32, [], or one for each channel, [N, 1, ...].

    Returns:
        Shape of q, `dtype`.
    """
    return ((q.float() - zero) * scale).to(dtype)


def _conv_fake(x: Tensor, x_scale: Tensor, x_zero: int, weight: Tensor, *rest: Any) -> Tensor:
    _, _, stride, padding, dilation, groups, *_ = rest
    found = _convolved(x.float(), weight.float(), stride, padding, dilation, groups)
    return found.to(x.dtype)


def _convolved(
    x: Tensor,
    weight: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Tensor:
    dims = weight.dim() - 2
    before, after = padding[:dims], padding[dims:]
    if list(before) != list(after):
        pairs = list(zip(before, after, strict=True))[::-1]
        x = functional.pad(x, [size for pair in pairs for size in pair])
        before = [0] * dims
    return _CONVS[dims](x, weight, None, stride, before, dilation, groups)


@operator(Trait.HEAVY | Trait.UNFOLDABLE, fake=_conv_fake)
def quantized_conv(
    x: Tensor,
    x_scale: Tensor,
    x_zero: int,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    y_scale: Tensor,
    y_zero: int,
    low: float | None,
    high: float | None,
) -> Tensor:
    """The convolution of quantized values: a sum of integers, scaled and rounded once.

    Padding stands for 0.

    Args:
        x: [B, C, size...], uint8; as many sizes as the weight has.
        x_scale: fp32, [].
        x_zero: what stands for 0 in x.
        weight: [N, C / groups, kernel...], int8.
        weight_scale: fp32, [N, 1, ...].
        bias: [N], int32, whose scale is that of x times that of the weight.
        padding: before each size, then behind each.
        y_scale: fp32, [], or one for each channel, [N, 1, ...].
        y_zero: what stands for 0 in the result.
        low: the result, as a float, is held above it before it is rounded; None: it is not.
        high: the same, below it.

    Returns:
        [B, N, size...], uint8.  Sums beyond 2^24 are rounded here, where an engine has them whole.
    """
    found = _convolved(x.float() - x_zero, weight.float(), stride, padding, dilation, groups)
    return finished(found, x.dtype, x_scale, weight_scale, bias, y_scale, y_zero, low, high)


def finished(
    sums: Tensor,
    dtype: torch.dtype,
    x_scale: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    y_scale: Tensor,
    y_zero: int,
    low: float | None,
    high: float | None,
) -> Tensor:
    """What `quantized_conv` makes of its sums.

    Args:
        sums: of products, [B, N, size...], fp32.
        dtype: of the result.
    """
    each = [-1, *[1] * (sums.dim() - 2)]
    found = sums if bias is None else sums + bias.float().reshape(each)
    found = found * (x_scale * weight_scale.reshape(each))
    if low is not None or high is not None:
        found = found.clamp(low, high)
    return _rounded(found / y_scale, y_zero, dtype)


@operator(Trait.UNFOLDABLE, fake=lambda left, *rest: torch.empty_like(left + rest[2]))
def quantized_add(
    left: Tensor,
    left_scale: Tensor,
    left_zero: int,
    right: Tensor,
    right_scale: Tensor,
    right_zero: int,
    y_scale: Tensor,
    y_zero: int,
    low: float | None,
    high: float | None,
) -> Tensor:
    """The sum of two quantized values, quantized.

    Args:
        left: uint8, any shape.
        right: uint8, of the same shape.
        low: as of `quantized_conv`.

    Returns:
        Shape of both, uint8.
    """
    found = (left.float() - left_zero) * left_scale + (right.float() - right_zero) * right_scale
    if low is not None or high is not None:
        found = found.clamp(low, high)
    return _rounded(found / y_scale, y_zero, left.dtype)
