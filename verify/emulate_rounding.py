"""Rounding to a storage dtype, and the sums that kernels round on the way."""

from collections.abc import Sequence

import torch
from torch import Tensor

from enginecast.verify.emulate_profiles import How, Profile

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
LOW = frozenset({torch.float16, torch.bfloat16, *FP8})
"""Storage dtypes that are emulated."""
BLOCK = 16
"""Products that a tensor core adds up before it rounds to an fp16 accumulator (mma.m16n8k16)."""


def round_to(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Round to nearest even, as hardware stores it.

    fp16, bf16 and e5m2 overflow to infinity.  e4m3fn saturates: it has no infinity, and whether a
    cast saturates or gives NaN changed between torch 2.12 and 2.13, so the clamp is explicit.
    """
    if dtype is torch.float8_e4m3fn:
        limit = torch.finfo(dtype).max
        tensor = tensor.clamp(-limit, limit)
    return tensor.to(dtype)


def total(x: Tensor, dims: Sequence[int], profile: Profile) -> Tensor:
    """Sum with the dims kept."""
    if profile.reduction.how == "fp32":
        return x.float().sum(tuple(dims), keepdim=True).to(x.dtype)
    for dim in dims:
        x = tree_sum(x, dim)
    return x


def tree_sum(x: Tensor, dim: int) -> Tensor:
    """Sum along a dim, kept: pairwise, as the threads of a block do it, each sum rounded."""
    x = x.movedim(dim, -1)
    while (size := x.shape[-1]) > 1:
        half = size // 2
        paired = x[..., :half] + x[..., half : 2 * half]
        x = torch.cat([paired, x[..., 2 * half :]], -1)
    if not x.shape[-1]:
        x = x.new_zeros((*x.shape[:-1], 1))
    return x.movedim(-1, dim)


def product(left: Tensor, right: Tensor, how: How) -> Tensor:
    """A matrix product, its sum kept in fp32 or in the storage dtype."""
    if how == "fp32":
        return (left.float() @ right.float()).to(left.dtype)
    found: Tensor | None = None
    for start in range(0, left.shape[-1], BLOCK):
        stop = start + BLOCK
        rows = right[start:stop] if right.dim() == 1 else right[..., start:stop, :]
        part = left[..., start:stop].float() @ rows.float()
        found = (part if found is None else found.float() + part).to(left.dtype)
    return left @ right if found is None else found


def softmax_steps(x: Tensor, dim: int, profile: Profile) -> Tensor:
    """Softmax, each step rounded."""
    powers = (x - x.amax(dim, keepdim=True)).exp()
    return powers / total(powers, (dim,), profile)
