"""Products of uint8 and int8 as x86 CPUs without VNNI compute them.

Their instruction (vpmaddubsw) multiplies two neighbors along K and adds the two products in 16
bits, where the sum saturates; the sums of pairs are then added in 32 bits.  ONNX Runtime uses it
for QLinearConv, MatMulIntegerToFloat, DynamicQuantizeMatMul and DynamicQuantizeLSTM
(microsoft/onnxruntime, onnxruntime/core/mlas/lib/x86_64/QgemmU8X8KernelAvx2.S).  These functions
give what 1.31 gave under an emulated Haswell, bit for bit, but for depthwise convolutions: its
kernel for those is exact, and here they saturate as others do.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from enginecast.ops.quantize import ZERO
from enginecast.ops.quantized_conv import finished
from enginecast.ops.quantized_gru import gru_by
from enginecast.ops.quantized_lstm import lstm_by, steps_of
from enginecast.ops.rules import Rules
from enginecast.ops.traits import OWN

own = torch.ops.enginecast

_AT_ONCE = 1 << 22
"""Products that are held in memory at once."""
_LEAST, _MOST = -(1 << 15), (1 << 15) - 1

PAIRS: Rules[Callable[..., Any]] = Rules()
"""Op -> what it gives where sums of two products saturate."""


def pair_sums(values: Tensor, weight: Tensor) -> Tensor:
    """The product of whole numbers of which each two neighbors along K are added in 16 bits.

    Args:
        values: [..., K], within 0..255, any dtype.
        weight: [K, N], within -128..127, any dtype.

    Returns:
        [..., N], fp64, whole numbers.
    """
    x, w = values.double(), weight.double()
    if x.shape[-1] % 2:
        x, w = functional.pad(x, [0, 1]), functional.pad(w, [0, 0, 0, 1])
    found = x @ w
    pairs = w.unflatten(0, (-1, 2))
    largest = torch.maximum(pairs.clamp(min=0).sum(1), pairs.clamp(max=0).sum(1).abs())
    risky = (255 * largest.amax(1) > _MOST).nonzero().flatten()
    rows = x.flatten(0, -2).unflatten(-1, (-1, 2))
    for some in risky.split(max(1, _AT_ONCE // max(1, rows.shape[0] * w.shape[1]))):
        each = torch.einsum("mpi,pin->mpn", rows[:, some], pairs[some])
        lost = (each.clamp(_LEAST, _MOST) - each).sum(1)
        found = found + lost.view(found.shape)
    return found


@PAIRS.rule(own.integer_linear.default)
def _integer_linear(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    if x.dtype != torch.uint8:
        found: Tensor = OWN[own.integer_linear.default].definition(
            x, x_scale, weight, weight_scale, bias, dtype
        )
        return found
    whole = (pair_sums(x, weight) - ZERO * weight.double().sum(0)).float()
    found = whole * x_scale * weight_scale
    return (found if bias is None else found + bias).to(dtype)


@PAIRS.rule(own.quantized_conv.default)
def _quantized_conv(
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
    *ends: Any,
) -> Tensor:
    """Neighbors along K are channels of one place, as ONNX Runtime lays them out."""
    dims = weight.dim() - 2
    sides = zip(padding[:dims], padding[dims:], strict=True)
    places = functional.pad(
        x.float(), [size for pair in [*sides][::-1] for size in pair], value=float(x_zero)
    )
    for at, (step, apart) in enumerate(zip(stride, dilation, strict=True)):
        reach = (weight.shape[2 + at] - 1) * apart + 1
        places = places.unfold(2 + at, reach, step)[..., ::apart]
    # [B, C, size..., kernel...] as [B, size..., groups, kernel..., C / groups]
    places = places.unflatten(1, (groups, -1))
    order = [0, *range(3, 3 + dims), 1, *range(3 + dims, 3 + 2 * dims), 2]
    rows = places.permute(order).flatten(2 + dims)
    kernels = weight.unflatten(0, (groups, -1)).movedim(2, -1).flatten(2)
    sums = [
        pair_sums(rows.select(1 + dims, group), kernels[group].t())
        - x_zero * kernels[group].double().sum(1)
        for group in range(groups)
    ]
    found = torch.cat(sums, -1).movedim(-1, 1).float().contiguous()
    return finished(found, x.dtype, x_scale, weight_scale, bias, *ends)


def _product(weight: Tensor, scale: Tensor) -> Callable[[Tensor], Tensor]:
    columns = weight.double().sum(0)

    def multiply(x: Tensor) -> Tensor:
        values, zero, step = steps_of(x)
        return (pair_sums(values, weight) - zero.double() * columns).float() * step * scale

    return multiply


@PAIRS.rule(own.quantized_lstm.default)
def _quantized_lstm(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    return lstm_by(_product, *arguments)


@PAIRS.rule(own.quantized_gru.default)
def _quantized_gru(*arguments: Any) -> tuple[Tensor, Tensor]:
    return gru_by(_product, *arguments)
