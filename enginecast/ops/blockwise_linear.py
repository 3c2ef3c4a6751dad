"""A linear whose weight has one scale for each block along K."""

import torch
from torch import Tensor
from torch.nn import functional

from enginecast.ops.quantize import E8M0, SMALLEST_SCALE
from enginecast.ops.traits import Trait, operator


@operator(Trait.FULL_RANGE, fake=lambda x, *_: x.new_empty(x.shape, dtype=torch.int8))
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


@operator(
    Trait.HEAVY | Trait.UNFOLDABLE, fake=lambda x, w, *_: x.new_empty((*x.shape[:-1], w.shape[0]))
)
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
        weight: [N, K] int8, for 4 bits within -8..7; or e4m3fn, for 4 bits the values of E2M1.
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


@operator(
    Trait.UNFOLDABLE,
    fake=lambda q, scale, axis, bits, dtype: q.new_empty(q.shape, dtype=dtype),
    form_of="onnx",
)
def dequantize_blocks(q: Tensor, scale: Tensor, axis: int, bits: int, dtype: torch.dtype) -> Tensor:
    """`enginecast.dequantize` with one scale for each block along a dimension of a matrix.

    Args:
        q: quantized, two dimensions.
        scale: any float dtype, of q's shape but for `axis`, where it has the number of blocks.
        axis: the dimension, 0 or 1.
        bits: of a value in an engine: 4 (int8 within -8..7, or e4m3fn that holds E2M1) or 8.
        dtype: of the result.

    Returns:
        Shape of q, `dtype`.
    """
    return _whole(q, scale, axis).to(dtype)


def _whole(q: Tensor, scale: Tensor, axis: int) -> Tensor:
    wide = q.float().unflatten(axis, (scale.shape[axis], -1))
    found: Tensor = (wide * scale.float().unsqueeze(axis + 1)).flatten(axis, axis + 1)
    return found


@operator(
    Trait.UNFOLDABLE,
    fake=lambda q, exponents, axis, dtype: q.new_empty(q.shape, dtype=dtype),
    form_of="onnx",
)
def dequantize_mx(q: Tensor, exponents: Tensor, axis: int, dtype: torch.dtype) -> Tensor:
    """`dequantize_blocks` with scales that are powers of two, in E8M0: OCP Microscaling Formats
    (MX) Specification v1.0, section 5.

    Args:
        q: e4m3fn, two dimensions.
        exponents: uint8, the bytes of E8M0.
        axis: the dimension of the blocks, 0 or 1.
        dtype: of the result.

    Returns:
        Shape of q, `dtype`.
    """
    return _whole(q, exponents.view(E8M0), axis).to(dtype)


def _packed_fake(weight: Tensor, block: int, bits: int) -> Tensor:
    rows, size = weight.shape
    return weight.new_empty((rows, size // block, block * bits // 8), dtype=torch.uint8)


@operator(fake=_packed_fake, form_of="onnx")
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


@operator(
    Trait.HEAVY, fake=lambda x, w, *_: x.new_empty((*x.shape[:-1], w.shape[0])), form_of="onnx"
)
def packed_linear(
    x: Tensor, packed: Tensor, scale: Tensor, bias: Tensor | None, bits: int, activations: bool
) -> Tensor:
    """`blockwise_linear` of a packed weight.

    Args:
        x: [..., K], fp32 or fp16.
        packed: see `pack_blocks`.
        scale: [N, K / block], dtype of x.
    """
    values = packed.short()
    if bits == 4:
        values = torch.stack([values & 15, values >> 4], -1).flatten(-2)
    weight = (values - (1 << (bits - 1))).to(torch.int8).flatten(1)
    found: Tensor = blockwise_linear(x, weight, scale.float(), bias, bits, activations)
    return found
