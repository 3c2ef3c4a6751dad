"""Fourier transforms are products with tables: as exact as torch's own, for every size and form."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lowering import lower, run
from programs import Function, captured, outputs, rewritten
from torch import Tensor
from torch.export import Dim

UNIT = 2.0**-24
LIMIT = 8.0
"""Of a relative error, in unit roundoffs; torch's own is 4 for large primes."""
KINDS = ("fft", "ifft", "rfft", "irfft", "hfft", "ihfft")
Transform = Callable[..., Tensor]


def given(kind: str, *shape: int) -> Tensor:
    """Values with a large mean, complex where the transform takes such."""
    real = torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))) + 3
    return torch.complex(real, real.flip(-1)) if kind in ("fft", "ifft", "irfft", "hfft") else real


def lost(function: Transform, x: Tensor) -> float:
    """The relative error of the rewritten program, in unit roundoffs."""
    program = captured(Function(function), x)
    after, sites = rewritten(program, "legalize-fourier")
    assert [site.reason for site in sites] == [""]
    found = outputs(after, x)[0]
    exact = function(x.to(torch.complex128 if x.is_complex() else torch.float64))
    assert found.shape == exact.shape
    assert found.dtype == function(x).dtype
    return float((found - exact).abs().norm() / exact.abs().norm()) / UNIT


@pytest.mark.parametrize("kind", KINDS)
def test_kinds(kind: str) -> None:
    transform = getattr(torch.fft, kind)
    own = {"n": 15} if kind in ("irfft", "hfft") else {}
    assert lost(lambda x: transform(x, **own), given(kind, 2, 8)) < LIMIT


@pytest.mark.parametrize("size", [1, 400, 97])
def test_sizes(size: int) -> None:
    """A table, factors, a prime with a table, factors of factors, and a prime without a table."""
    assert lost(torch.fft.fft, given("fft", 2, size)) < LIMIT


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("fft", {"n": 20, "dim": 0, "norm": "ortho"}),
        ("hfft", {"n": 40, "norm": "forward"}),
        ("irfft2", {"s": (3, 8)}),
        ("ihfftn", {"s": (3, -1), "dim": (0, 1)}),
    ],
)
def test_forms(kind: str, options: dict[str, Any]) -> None:
    transform = getattr(torch.fft, kind)
    assert lost(lambda x: transform(x, **options), given(kind.rstrip("2n"), 6, 15)) < LIMIT


def test_an_engine_of_a_size_that_varies(tmp_path: Path) -> None:
    def forward(x: Tensor) -> Tensor:
        back = torch.fft.irfft(torch.fft.rfft(x) * 2, n=x.shape[-1])
        found: Tensor = back + torch.fft.fft(x).abs()
        return found

    sizes = {0: Dim("batch", min=1, max=8), 1: Dim("size", min=2, max=1200)}
    lower(captured(Function(forward), torch.randn(3, 30), dynamic=sizes), tmp_path)
    for size in (2, 31, 400):
        x = given("rfft", 2, size)
        exact = forward(x.double())
        assert float((run(tmp_path, x)[0] - exact).norm() / exact.norm()) / UNIT < LIMIT


@pytest.mark.parametrize("options", [{}, {"length": 33}, {"normalized": True}, {"onesided": False}])
def test_a_signal_of_frames(options: dict[str, Any]) -> None:
    def signal(x: Tensor) -> Tensor:
        window = torch.hamming_window(18, dtype=x.real.dtype)
        return torch.istft(x, 20, 5, 18, window, **options)

    rows = 20 if options.get("onesided") is False else 11
    assert lost(signal, given("ifft", 2, rows, 9)) < LIMIT
