"""Products of quantized values.

Two forms hold the weight as ONNX Runtime reads it, `integer_linear` and `fp8_gemm`; they compute
the same.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from enginecast.ops.quantize import ZERO
from enginecast.ops.traits import Trait, operator


def _fake(x: Tensor, x_scale: Tensor, weight: Tensor, *rest: Any, dim: int = 0) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[dim]), dtype=rest[-1])


_EXACT = 1024
"""Products of two numbers of 8 bits of which fp32 holds the sum, whatever the order."""


def _whole(x: Tensor, weight: Tensor) -> Tensor:
    """The linear of whole numbers of 8 bits, exact up to one rounding at the end."""
    parts = zip(x.split(_EXACT, -1), weight.split(_EXACT, 1), strict=True)
    found = [functional.linear(*part) for part in parts]
    return found[0] if len(found) == 1 else torch.stack(found).sum(0, dtype=torch.float64).float()


@operator(Trait.HEAVY | Trait.UNFOLDABLE, fake=_fake)
def quantized_linear(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """The product of quantized values, summed in fp32 (int8: exactly), then scaled.

    Args:
        x: [..., K], quantized.
        x_scale: fp32, [] or [..., 1].
        weight: [N, K], quantized.
        weight_scale: fp32, [] or [N, 1].
        bias: [N], any float dtype; added in fp32.
        dtype: float dtype of the result.

    Returns:
        [..., N], `dtype`.
    """
    product = _whole if x.dtype == torch.int8 else functional.linear
    found = product(x.float(), weight.float()) * x_scale * weight_scale.reshape(-1)
    return (found if bias is None else found + bias.float()).to(dtype)


@operator(Trait.HEAVY, fake=partial(_fake, dim=1), form_of="onnx")
def integer_linear(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """`quantized_linear` of int8, its weight transposed.

    Args:
        x: int8, or uint8 with a zero of 128.
        weight: [K, N].
        weight_scale: fp32, [N] or [].
        bias: [N], fp32.
    """
    signed = x.float() - (ZERO if x.dtype == torch.uint8 else 0)
    found = _whole(signed, weight.t().float()) * x_scale * weight_scale
    return (found if bias is None else found + bias).to(dtype)


@operator(Trait.HEAVY, fake=_fake, form_of="onnx")
def fp8_gemm(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """`quantized_linear` of fp8 by com.microsoft GemmFloat8.

    Args:
        weight_scale: fp32, [] or [N].
        bias: [N], fp32.
    """
    found = functional.linear(x.float(), weight.float()) * x_scale * weight_scale
    return (found if bias is None else found + bias).to(dtype)
