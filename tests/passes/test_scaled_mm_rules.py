"""CUDA's rules for fp8 products: at least as strict as torch's meta kernel, and where stricter."""

import logging
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from enginecast.passes.quantize.plan.architectures import Column, architecture, matrix
from enginecast.passes.quantize.plan.scaled_mm_rules import check_scaled_mm, fp8_dtype

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FNUZ = torch.float8_e4m3fnuz
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

AXES: dict[str, tuple[Any, ...]] = {
    "m": (16, 1, 5),
    "k": (64, 24, 17),
    "n": (32, 40, 7),
    "dtypes": ((E4M3, E4M3), (E4M3, E5M2), (E5M2, E4M3), (E5M2, E5M2), (FNUZ, FNUZ), (E4M3, BF16)),
    "a": ("row-major", "column-major"),
    "b": ("column-major", "row-major"),
    "scales": (
        *("one", "rows", "rows and one", "one and rows", "swapped", "flat", "strided", "fp16"),
        "blocks",
    ),
    "bias": (None, BF16, FP16, FP32),
    "out": (BF16, FP16, FP32),
}
"""What varies; the first value of each is fine."""
ONLY_OURS = {
    "two matrices of e5m2 cannot be multiplied": "cuBLASLt has no such product",
    "sm90 multiplies": "fnuz is for one AMD GPU",
    "a product in f32 takes no bias": "checked when the kernel is called",
    "the bias has to be": "checked when the kernel is called",
    "with a scale for each row, sm90 gives": "f32 is newer than the oldest torch",
    "with a scale for each row, scale_b has to be": "blocks of 1x128: sm90 alone, unused here",
}
"""Reasons for which we refuse what the meta kernel takes."""


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """The meta kernel's refusals come with a traceback in the log."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(before)


def values(rows: int, columns: int, dtype: torch.dtype, layout: str) -> Tensor:
    if layout == "row-major":
        return torch.empty((rows, columns), dtype=dtype, device="cuda")
    return torch.empty((columns, rows), dtype=dtype, device="cuda").t()


def scales(kind: str, m: int, k: int, n: int) -> tuple[Tensor, Tensor]:
    shapes: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
        "one": ((), (1,)),
        "rows and one": ((m, 1), ()),
        "one and rows": ((), (1, n)),
        "swapped": ((1, m), (n, 1)),
        "flat": ((m,), (n,)),
        "blocks": ((m, -(-k // 128)), (-(-k // 128), -(-n // 128))),
    }
    dtype = FP16 if kind == "fp16" else FP32
    left, right = shapes.get(kind, ((m, 1), (1, n)))
    found = tuple(torch.empty(shape, dtype=dtype, device="cuda") for shape in (left, right))
    if kind == "strided":
        return found[0], torch.empty_strided((1, n), (2 * n, 2), device="cuda")
    return found[0], found[1]


def grid() -> Iterator[dict[str, Any]]:
    """Each pair of values of two axes, all else fine; and as many at random."""
    fine = {name: values[0] for name, values in AXES.items()}
    names = list(AXES)
    pairs = [
        fine | {one: x, other: y}
        for index, one in enumerate(names)
        for other in names[index + 1 :]
        for x in AXES[one]
        for y in AXES[other]
    ]
    draw = random.Random(0)
    drawn = [{name: draw.choice(values) for name, values in AXES.items()} for _ in pairs]
    yield from (*pairs, *drawn)


def arguments(case: dict[str, Any]) -> list[Any]:
    m, k, n = (case[name] for name in "mkn")
    left, right = case["dtypes"]
    bias = None if case["bias"] is None else torch.empty(n, dtype=case["bias"], device="cuda")
    return [
        values(m, k, left, case["a"]),
        values(k, n, right, case["b"]),
        *scales(case["scales"], m, k, n),
        bias,
        case["out"],
    ]


def meta_takes(a: Any, b: Any, scale_a: Any, scale_b: Any, bias: Any, out: Any) -> bool:
    try:
        torch._scaled_mm(a, b, scale_a, scale_b, bias, out_dtype=out)
    except (RuntimeError, ValueError):
        return False
    return True


def test_what_the_meta_kernel_refuses_is_refused_and_what_only_we_refuse_is_listed() -> None:
    refused, ours = 0, dict.fromkeys(ONLY_OURS, 0)
    with FakeTensorMode():
        for case in grid():
            given = arguments(case)
            reason = check_scaled_mm(*given, arch="sm90")
            if not meta_takes(*given):
                refused += 1
                assert reason, f"the meta kernel refuses {case}"
            elif reason:
                listed = [known for known in ONLY_OURS if reason.startswith(known)]
                assert listed, f"{case}: {reason}"
                ours[listed[0]] += 1
    assert refused > 500
    assert min(ours.values()) > 0, ours


FINE: dict[str, Any] = {name: values[0] for name, values in AXES.items()}
REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "an old GPU": ({}, "sm86", "fp8 products need sm89 or sm90 and later, and sm86 is older"),
    "no GPU": ({}, "gfx90a", "fp8 products: gfx90a is not an architecture that has them"),
    "AMD's own fp8": ({}, "gfx942", "gfx942 multiplies f8_e4m3fnuz, f8_e5m2fnuz, got f8_e4m3fn"),
    "not fp8": ({"dtypes": (E4M3, BF16)}, "sm90", "both matrices have to be fp8"),
    "K": ({"k": 24}, "sm90", "native fp8 wants multiples of 16: K=24"),
    "K and N": ({"k": 24, "n": 40}, "cpu", "native fp8 wants multiples of 16: K=24 and N=40"),
    "layout": ({"b": "row-major"}, "cpu", "b has to be column-major, got strides [32, 1]"),
    "mixed scales": (
        {"scales": "rows and one"},
        "sm90",
        "with a scale for each row, scale_b has to be [1, 32], got []",
    ),
    "scales of another dtype": ({"scales": "fp16"}, "cpu", "scale_a has to be f32, got f16"),
    "bias in f32": ({"out": FP32, "bias": BF16}, "sm90", "a product in f32 takes no bias"),
    "another bias": ({"bias": FP16}, "sm90", "the bias has to be bf16, got f16"),
    "rows in f32": (
        {"scales": "rows", "out": FP32},
        "sm90",
        "with a scale for each row, sm90 gives bf16 or f16, not f32",
    ),
    "rows in fp16 on AMD": (
        {"scales": "rows", "out": FP16, "dtypes": (FNUZ, FNUZ)},
        "gfx942",
        "with a scale for each row, gfx942 gives bf16, not f16",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_reasons_say_what_is_wrong(name: str) -> None:
    changes, arch, reason = REFUSED[name]
    with FakeTensorMode():
        found = check_scaled_mm(*arguments(FINE | changes), arch=arch)
    assert reason in found


@pytest.mark.parametrize("arch", ["cpu", "sm89", "sm90", "sm100", "sm120", "gfx942", "gfx950"])
@pytest.mark.parametrize("kind", ["one", "rows"])
def test_what_is_right_is_taken(arch: str, kind: str) -> None:
    dtype = fp8_dtype(arch)
    case = FINE | {"scales": kind, "dtypes": (dtype, dtype), "bias": BF16, "m": 1}
    with FakeTensorMode():
        assert check_scaled_mm(*arguments(case), arch=arch) == ""


def test_the_cpu_kernel_takes_what_a_gpu_refuses() -> None:
    """Why the rules have to be checked apart from running anything."""
    a, b = torch.ones(5, 17).to(E4M3), torch.ones(17, 7).to(E4M3)
    one = torch.ones(())
    assert torch._scaled_mm(a, b, one, one, out_dtype=FP32).eq(17).all()
    assert check_scaled_mm(a, b, one, one, None, FP32)


@pytest.mark.parametrize("arch", [name for name in matrix().architectures if name != "cpu"])
@pytest.mark.parametrize(("kind", "column"), [("one", "tensorwise"), ("rows", "rowwise")])
def test_the_matrix_of_architectures_says_the_same(arch: str, kind: str, column: Column) -> None:
    dtype = fp8_dtype(arch)
    case = FINE | {"scales": kind, "dtypes": (dtype, dtype)}
    with FakeTensorMode():
        reason = check_scaled_mm(*arguments(case), arch=arch)
    assert (architecture(arch).cell(column).supported == "no") == bool(reason), reason
