"""What one layer gives when its values are rounded as a plan says: arithmetic of its own.

It shares no code with the operators that the rewriting inserts (`enginecast.quantized_ops`), and
rounds to fp8 without torch's cast, so that each is a check on the other.

    x^ = scale * round(x / scale),  scale = max |x| / limit       for each tensor, row or block
    y  = W^ x^ + b                                                summed in fp32

Source of the formats: Micikevicius et al. 2022, https://arxiv.org/abs/2209.05433 (e4m3); Noune et
al. 2022, https://arxiv.org/abs/2206.02915 (e4m3 with one zero, "fnuz").
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from enginecast.passes.quantization_plan import Format, LayerPlan, Scaling

FLOOR = 2.0**-40
"""Of a scale: a row of zeros has one, too."""
FNUZ = frozenset({"gfx942"})
"""Architectures whose fp8 is e4m3fnuz."""
_MANTISSA = 3


@dataclass(frozen=True)
class Grid:
    """The values that a format has."""

    limit: float
    round: Callable[[Tensor], Tensor]
    """fp32 within +-limit to the nearest value of the format, ties to even."""


def _fp8_grid(limit: float, least_exponent: int) -> Grid:
    def rounded(x: Tensor) -> Tensor:
        _, exponent = torch.frexp(x)
        step = torch.ldexp(torch.ones_like(x), (exponent - 1).clamp(min=least_exponent) - _MANTISSA)
        return (x / step).round() * step

    return Grid(limit, rounded)


E4M3 = _fp8_grid(448.0, -6)
E4M3_FNUZ = _fp8_grid(240.0, -7)


def grid_of(quantized: Format, arch: str, bits: int) -> Grid:
    """The values of a format on an architecture."""
    if quantized == "fp8":
        return E4M3_FNUZ if arch in FNUZ else E4M3
    return Grid(2.0 ** (bits - 1) - 1, torch.round)


def fake(x: Tensor, grid: Grid, scaling: Scaling, block: int, largest: Tensor | None) -> Tensor:
    """x rounded to a grid and brought back, in fp32.

    Args:
        x: [..., K]; a weight that is scaled by rows has its rows first: [N, ...].
        grid: of the format.
        scaling: what shares one scale: all of x, each vector along the last dim, or each `block`
            values of it.
        block: for blocks.
        largest: max |x| to go by instead of x's own; None: x's own.
    """
    wide = x.float()
    if scaling == "block":
        wide = wide.unflatten(-1, (-1, block))
    if largest is None:
        sizes = wide.abs()
        largest = sizes.amax() if scaling == "tensor" else sizes.amax(-1, keepdim=True)
    scale = (largest.float() / grid.limit).clamp(min=FLOOR)
    found = grid.round((wide / scale).clamp(-grid.limit, grid.limit)) * scale
    return found.flatten(-2) if scaling == "block" else found


def fake_weight(weight: Tensor, plan: LayerPlan, grid: Grid) -> Tensor:
    """A weight as the layer reads it after the rewriting; fp32 values.

    Args:
        weight: [N, K], [rows, size] or [out, in, kernel...].
    """
    rows = weight.flatten(1)
    found = fake(rows, grid, plan.weights, plan.block, None).view(weight.shape)
    # What is stored is brought back to the dtype of the layer, and read from there.
    is_whole = plan.choice == "storage" and plan.weights != "block"
    return found.to(weight.dtype).float() if is_whole else found


def fake_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    plan: LayerPlan,
    grid: Grid,
    largest: Tensor | None,
) -> Tensor:
    """A linear of a plan.

    Args:
        x: [..., K], any float dtype.
        weight: fp32, of `fake_weight`.
        bias: [N] or None.
        grid: of the activations.
        largest: max |x| over the calibration inputs, where the scale is static.

    Returns:
        [..., N], dtype of x.
    """
    read = x.float()
    if plan.activations is not None:
        read = fake(x, grid, plan.activations, plan.block, largest)
    found: Tensor = functional.linear(read, weight, None if bias is None else bias.float())
    return found.to(x.dtype)
