"""What `torch._scaled_mm` demands on a GPU, checked on any machine.

The CPU kernel of torch takes whatever it is given, so a program that a GPU refuses would pass every
test elsewhere.  The rules are those of aten/src/ATen/native/cuda/ScaledBlas.cpp; torch's own
meta kernel (torch/_meta_registrations.py) checks a part of them.
"""

import re
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from enginecast.passes.ir.edit import same_shape, same_size
from enginecast.passes.ir.text import dtype_text

MULTIPLE = 16
"""K and N are multiples of it; M is free."""

_OCP = frozenset({torch.float8_e4m3fn, torch.float8_e5m2})
_FNUZ = frozenset({torch.float8_e4m3fnuz, torch.float8_e5m2fnuz})
_WIDE_E5M2 = frozenset({torch.float8_e5m2, torch.float8_e5m2fnuz})
_LOW = {torch.bfloat16, torch.float16}
_AMD: dict[str, frozenset[torch.dtype]] = {
    "gfx942": _FNUZ,
    "gfx950": _OCP,
    "gfx1200": _OCP,
    "gfx1201": _OCP,
}
_SM = re.compile(r"sm(\d+)(\d)[a-z]?")


def fp8_dtype(arch: str) -> torch.dtype:
    """The fp8 dtype with four bits of exponent that a GPU multiplies; e4m3fn on a CPU."""
    return torch.float8_e4m3fnuz if arch == "gfx942" else torch.float8_e4m3fn


def check_scaled_mm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    *,
    arch: str = "cpu",
) -> str:
    """Why a GPU would refuse `torch._scaled_mm(a, b, ...)`; empty when it takes it.

    Shapes, strides and dtypes are looked at, values are not: fake tensors and those of the meta
    device do.

    Args:
        a: [M, K], fp8, row-major.
        b: [K, N], fp8, column-major: the transpose of a weight [N, K].
        scale_a: fp32: one value, or [M, 1].
        scale_b: fp32: one value, or [1, N].
        bias: [N].
        out_dtype: None: that of `a`.
        arch: "sm90", "gfx942"; "cpu": what all GPUs demand, without the rules of one of them.
    """
    out = a.dtype if out_dtype is None else out_dtype
    return next(_faults(a, b, scale_a, scale_b, bias, out, arch), "")


def _faults(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None,
    out: torch.dtype,
    arch: str,
) -> Iterator[str]:
    yield from _device(arch)
    if a.dim() != 2 or b.dim() != 2:
        yield f"fp8 products are of matrices, got {a.dim()} and {b.dim()} dims"
    elif not same_size(a.shape[1], b.shape[0]):
        yield f"a has {a.shape[1]} columns and b {b.shape[0]} rows"
    yield from _dtypes(a.dtype, b.dtype, arch)
    if not (a.stride(1) == 1 and a.stride(0) > 1):
        yield f"a has to be row-major, got strides {list(a.stride())}"
    if not (b.stride(0) == 1 and b.stride(1) > 1):
        yield f"b has to be column-major, got strides {list(b.stride())}"
    if wrong := off_multiple(b.shape[1], a.shape[1]):
        yield wrong
    yield from _scales(a, b, scale_a, scale_b)
    if bias is not None:
        yield from _bias(bias, b, out)
    yield from _result(scale_a, scale_b, out, arch)


def _device(arch: str) -> Iterator[str]:
    if arch == "cpu" or arch in _AMD:
        return
    found = _SM.fullmatch(arch)
    if found is None:
        yield f"fp8 products: {arch} is not an architecture that has them"
    elif (int(found[1]), int(found[2])) < (8, 9):
        yield f"fp8 products need sm89 or sm90 and later, and {arch} is older"


def _dtypes(a: torch.dtype, b: torch.dtype, arch: str) -> Iterator[str]:
    given = f"{dtype_text(a)} and {dtype_text(b)}"
    if not {a, b} <= _OCP | _FNUZ:
        yield f"both matrices have to be fp8, got {given}"
    if {a, b} <= _WIDE_E5M2:
        yield f"two matrices of e5m2 cannot be multiplied, got {given}"
    allowed = _AMD.get(arch, _OCP)
    if arch == "cpu":
        allowed = _FNUZ if a in _FNUZ else _OCP
    if not {a, b} <= allowed:
        yield f"{arch} multiplies {_words(allowed, ', ')}, got {given}"


def off_multiple(n: int, k: int) -> str:
    """Why a native fp8 product refuses a weight [n, k]; empty when it takes it."""
    wrong = [f"{name}={size}" for name, size in (("K", k), ("N", n)) if size % MULTIPLE]
    if not wrong:
        return ""
    return f"native fp8 wants multiples of {MULTIPLE}: {' and '.join(wrong)}"


def _scales(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> Iterator[str]:
    by_row = (("scale_a", scale_a, (a.shape[0], 1)), ("scale_b", scale_b, (1, b.shape[1])))
    for name, scale, _ in by_row:
        if scale.dtype != torch.float32:
            yield f"{name} has to be f32, got {dtype_text(scale.dtype)}"
    if _is_single(scale_a) and _is_single(scale_b):
        return
    for name, scale, wanted in by_row:
        if not same_shape(scale.shape, wanted):
            given = list(scale.shape)
            yield f"with a scale for each row, {name} has to be {list(wanted)}, got {given}"
        elif not scale.is_contiguous():
            yield f"{name} has to be contiguous, got strides {list(scale.stride())}"


def _bias(bias: Tensor, b: Tensor, out: torch.dtype) -> Iterator[str]:
    if bias.numel() != b.shape[1]:
        yield f"the bias has {bias.numel()} values for {b.shape[1]} columns"
    if out == torch.float32:
        yield "a product in f32 takes no bias: add it afterwards"
    fitting = {out} if out in _LOW else _LOW
    if bias.dtype not in fitting:
        yield f"the bias has to be {_words(fitting, ' or ')}, got {dtype_text(bias.dtype)}"


def _result(scale_a: Tensor, scale_b: Tensor, out: torch.dtype, arch: str) -> Iterator[str]:
    floats = _LOW | {torch.float32}
    if out not in floats | _OCP | _FNUZ:
        yield f"no fp8 product gives {dtype_text(out)}"
    # torch 2.11 is the oldest one supported; f32 is newer, and hipBLASLt has bf16 alone.
    by_row = floats if arch == "cpu" else _LOW
    if arch in _AMD:
        by_row = {torch.bfloat16}
    if out not in by_row and not (_is_single(scale_a) and _is_single(scale_b)):
        wanted = _words(by_row, " or ")
        yield f"with a scale for each row, {arch} gives {wanted}, not {dtype_text(out)}"


def _words(dtypes: Iterable[torch.dtype], between: str) -> str:
    return between.join(sorted(map(dtype_text, dtypes)))


def _is_single(scale: Tensor) -> bool:
    return all(isinstance(size, int) and size == 1 for size in scale.shape)
