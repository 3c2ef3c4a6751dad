"""The forms that quantised values take on the way to ONNX: operators between `legalize_quantized`,
which chooses among them, and `onnx_quantized`, which says each in ONNX.

They compute what the operators of `enginecast.quantized_ops` compute, on weights laid out as ONNX
Runtime wants them; so a program can still be run in torch when it has been legalised.
"""

import torch
from torch import Tensor
from torch.nn import functional

from enginecast.quantized_ops import blockwise_linear

ZERO = 128
"""What stands for 0 in unsigned values."""


@torch.library.custom_op("enginecast::quantize_unsigned", mutates_args=())
def quantize_unsigned(x: Tensor, scale: Tensor) -> Tensor:
    """`enginecast.quantize(x, scale, int8)` plus 128, as uint8: what the CPU multiplies fast.

    Args:
        x: [..., K], any float dtype.
        scale: fp32, [] or [..., 1].

    Returns:
        uint8, shape of x; within 1..255.
    """
    rounded = (x.float() / scale).round().clamp(-127, 127)
    return (rounded + ZERO).to(torch.uint8)


@quantize_unsigned.register_fake
def _quantize_unsigned_fake(x: Tensor, scale: Tensor) -> Tensor:
    return x.new_empty(x.shape, dtype=torch.uint8)


@torch.library.custom_op("enginecast::integer_linear", mutates_args=())
def integer_linear(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """`enginecast.quantized_linear` of int8, its weight transposed.

    Args:
        x: [..., K], int8, or uint8 with a zero of 128.
        x_scale: fp32, [] or [..., 1].
        weight: [K, N], int8.
        weight_scale: fp32, [N] or [].
        bias: [N], fp32.
        dtype: float dtype of the result.

    Returns:
        [..., N], `dtype`.
    """
    wide = x.double() - (ZERO if x.dtype == torch.uint8 else 0)
    found = (wide @ weight.double()).float() * x_scale * weight_scale
    return (found if bias is None else found + bias).to(dtype)


@integer_linear.register_fake
def _integer_linear_fake(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[1]), dtype=dtype)


@torch.library.custom_op("enginecast::fp8_gemm", mutates_args=())
def fp8_gemm(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """`enginecast.quantized_linear` of fp8 by com.microsoft GemmFloat8.

    Args:
        x: [..., K], fp8.
        x_scale: fp32, [] or [..., 1].
        weight: [N, K], fp8.
        weight_scale: fp32, [] or [N].
        bias: [N], fp32.
        dtype: float dtype of the result.

    Returns:
        [..., N], `dtype`.
    """
    found = functional.linear(x.float(), weight.float()) * x_scale * weight_scale
    return (found if bias is None else found + bias).to(dtype)


@fp8_gemm.register_fake
def _fp8_gemm_fake(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]), dtype=dtype)


@torch.library.custom_op(
    "enginecast::dequantize_axis", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,)
)
def dequantize_axis(q: Tensor, scale: Tensor, axis: int, dtype: torch.dtype) -> Tensor:
    """`enginecast.dequantize` with one scale for each index of one dimension, or for all.

    Args:
        q: quantised.
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


@dequantize_axis.register_fake
def _dequantize_axis_fake(q: Tensor, scale: Tensor, axis: int, dtype: torch.dtype) -> Tensor:
    return q.new_empty(q.shape, dtype=dtype)


@torch.library.custom_op("enginecast::pack_blocks", mutates_args=())
def pack_blocks(weight: Tensor, block: int, bits: int) -> Tensor:
    """A weight as com.microsoft MatMulNBits reads it: unsigned, with the middle of the range for 0,
    two values of 4 bits in a byte, the earlier one in its low half.

    Source: onnxruntime docs/ContribOperators.md, com.microsoft.MatMulNBits.

    Args:
        weight: [N, K] int8; for 4 bits within -8..7.
        block: size of a block along K; divides K.
        bits: 4 or 8.

    Returns:
        uint8, [N, K / block, block * bits / 8].
    """
    values: Tensor = (weight.short() + (1 << (bits - 1))).to(torch.uint8).unflatten(1, (-1, block))
    if bits == 4:
        values = values[..., 0::2] | (values[..., 1::2] << 4)
    return values.contiguous()


@pack_blocks.register_fake
def _pack_blocks_fake(weight: Tensor, block: int, bits: int) -> Tensor:
    rows, size = weight.shape
    return weight.new_empty((rows, size // block, block * bits // 8), dtype=torch.uint8)


@torch.library.custom_op("enginecast::packed_linear", mutates_args=())
def packed_linear(
    x: Tensor, packed: Tensor, scale: Tensor, bias: Tensor | None, bits: int, activations: bool
) -> Tensor:
    """`enginecast.blockwise_linear` of a packed weight.

    Args:
        x: [..., K], fp32 or fp16.
        packed: see `pack_blocks`.
        scale: [N, K / block], dtype of x.
        bias: [N], dtype of x.
        bits: 4 or 8.
        activations: whether blocks of x are rounded to int8, too.

    Returns:
        [..., N], dtype of x.
    """
    values = packed.short()
    if bits == 4:
        values = torch.stack([values & 15, values >> 4], -1).flatten(-2)
    weight = (values - (1 << (bits - 1))).to(torch.int8).flatten(1)
    found: Tensor = blockwise_linear(x, weight, scale.float(), bias, bits, activations)
    return found


@packed_linear.register_fake
def _packed_linear_fake(
    x: Tensor, packed: Tensor, scale: Tensor, bias: Tensor | None, bits: int, activations: bool
) -> Tensor:
    return x.new_empty((*x.shape[:-1], packed.shape[0]))


@torch.library.custom_op("enginecast::values_of_bytes", mutates_args=())
def values_of_bytes(raw: Tensor, table: Tensor) -> Tensor:
    """What bytes stand for.

    Args:
        raw: uint8.
        table: [256].

    Returns:
        Shape of raw, dtype of the table.
    """
    return table[raw.int()]


@values_of_bytes.register_fake
def _values_of_bytes_fake(raw: Tensor, table: Tensor) -> Tensor:
    return table.new_empty(raw.shape)
