"""What `torch._scaled_mm` demands on a GPU of a linear's sizes and dtypes, checked on any machine.

The CPU kernel of torch takes whatever it is given, so a program that a GPU refuses would pass every
test elsewhere.  The rules are those of aten/src/ATen/native/cuda/ScaledBlas.cpp.  Those of layouts
and of the shapes of scales are not among them: `decompose-quantized` always meets them.
"""

import re

import torch

from enginecast.passes.ir.text import dtype_text

MULTIPLE = 16
"""K and N are multiples of it; M is free."""

_AMD = frozenset({"gfx942", "gfx950", "gfx1200", "gfx1201"})
_SM = re.compile(r"sm(\d+)(\d)[a-z]?")


def fp8_dtype(arch: str) -> torch.dtype:
    """The fp8 dtype with four bits of exponent that a GPU multiplies; e4m3fn on a CPU."""
    return torch.float8_e4m3fnuz if arch == "gfx942" else torch.float8_e4m3fn


def off_multiple(n: int, k: int) -> str:
    """Why a native fp8 product refuses a weight [n, k]; empty when it takes it."""
    wrong = [f"{name}={size}" for name, size in (("K", k), ("N", n)) if size % MULTIPLE]
    if not wrong:
        return ""
    return f"native fp8 wants multiples of {MULTIPLE}: {' and '.join(wrong)}"


def refusal(n: int, k: int, out: torch.dtype | None, *, by_row: bool, arch: str) -> str:
    """Why a GPU would refuse the fp8 product of a weight [n, k]; empty when it takes it.

    Args:
        out: dtype of the result.
        by_row: whether there is a scale for each row of x and of the weight, else one for each.
        arch: "sm90", "gfx942"; "cpu": what all GPUs demand, without the rules of one of them.
    """
    if arch != "cpu" and arch not in _AMD:
        version = _SM.fullmatch(arch)
        if version is None:
            return f"fp8 products: {arch} is not an architecture that has them"
        if (int(version[1]), int(version[2])) < (8, 9):
            return f"fp8 products need sm89 or sm90 and later, and {arch} is older"
    if wrong := off_multiple(n, k):
        return wrong
    if out not in (torch.bfloat16, torch.float16, torch.float32):
        return f"no fp8 product gives {dtype_text(out)}"
    # torch 2.11 is the oldest one supported; f32 is newer, and hipBLASLt has bf16 alone.
    low = "bf16" if arch in _AMD else "bf16 or f16"
    if by_row and arch != "cpu" and dtype_text(out) not in low.split(" or "):
        return f"with a scale for each row, {arch} gives {low}, not {dtype_text(out)}"
    return ""
