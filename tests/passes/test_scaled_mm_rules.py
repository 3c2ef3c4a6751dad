"""CUDA's rules for fp8 products: at least as strict as torch's meta kernel, and where stricter."""

import itertools
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from enginecast.passes.quantize.plan.architectures import Column, architecture, matrix
from enginecast.passes.quantize.plan.scaled_mm_rules import fp8_dtype, refusal

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """The meta kernel's refusals come with a traceback in the log."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(before)


def meta_takes(n: int, k: int, out: torch.dtype, by_row: bool) -> bool:
    dtype = torch.float8_e4m3fn
    with FakeTensorMode():
        x, weight = (torch.empty(m, k, device="cuda").to(dtype) for m in (5, n))
        shapes = ((5, 1), (1, n)) if by_row else ((), ())
        x_scale, scale = (torch.empty(shape, device="cuda") for shape in shapes)
        try:
            torch._scaled_mm(x, weight.t(), x_scale, scale, out_dtype=out)
        except (RuntimeError, ValueError):
            return False
    return True


def test_what_the_meta_kernel_refuses_is_refused_and_of_the_rest_only_what_is_newer() -> None:
    found = set()
    sizes = ((32, 64), (40, 64), (32, 24), (7, 17))
    for (n, k), out, by_row in itertools.product(sizes, (BF16, FP16, FP32), (True, False)):
        reason = refusal(n, k, out, by_row=by_row, arch="sm90")
        takes = meta_takes(n, k, out, by_row)
        found.add((takes, bool(reason)))
        assert takes or reason
        if takes and reason:
            assert "with a scale for each row, sm90 gives" in reason
    assert found == {(True, False), (False, True), (True, True)}


REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "an old GPU": ({}, "sm86", "fp8 products need sm89 or sm90 and later, and sm86 is older"),
    "no GPU": ({}, "gfx90a", "fp8 products: gfx90a is not an architecture that has them"),
    "K": ({"k": 24}, "sm90", "native fp8 wants multiples of 16: K=24"),
    "K and N": ({"k": 24, "n": 40}, "cpu", "native fp8 wants multiples of 16: K=24 and N=40"),
    "fp64": ({"out": torch.float64}, "cpu", "no fp8 product gives f64"),
    "rows in f32": (
        {"by_row": True, "out": FP32},
        "sm90",
        "with a scale for each row, sm90 gives bf16 or f16, not f32",
    ),
    "rows in fp16 on AMD": (
        {"by_row": True, "out": FP16},
        "gfx942",
        "with a scale for each row, gfx942 gives bf16, not f16",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_reasons_say_what_is_wrong(name: str) -> None:
    changes, arch, reason = REFUSED[name]
    fine = {"n": 32, "k": 64, "out": BF16, "by_row": False}
    assert reason in refusal(**{**fine, **changes}, arch=arch)


@pytest.mark.parametrize("arch", ["cpu", "sm89", "sm90", "sm100", "sm120", "gfx942", "gfx950"])
@pytest.mark.parametrize("by_row", [True, False])
def test_what_is_right_is_taken(arch: str, by_row: bool) -> None:
    assert refusal(32, 64, BF16, by_row=by_row, arch=arch) == ""


def test_the_cpu_kernel_takes_what_a_gpu_refuses() -> None:
    """Why the rules have to be checked apart from running anything."""
    a, b = (torch.ones(shape).to(fp8_dtype("cpu")) for shape in ((5, 17), (17, 7)))
    one = torch.ones(())
    assert torch._scaled_mm(a, b, one, one, out_dtype=FP32).eq(17).all()
    assert refusal(7, 17, FP32, by_row=False, arch="cpu")


@pytest.mark.parametrize("arch", [name for name in matrix().architectures if name != "cpu"])
@pytest.mark.parametrize(("by_row", "column"), [(False, "tensorwise"), (True, "rowwise")])
def test_the_matrix_of_architectures_says_the_same(arch: str, by_row: bool, column: Column) -> None:
    reason = refusal(32, 64, BF16, by_row=by_row, arch=arch)
    assert (architecture(arch).cell(column).supported == "no") == bool(reason), reason
