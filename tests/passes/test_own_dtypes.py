"""Dtypes that the model's own code asks for: fp32 around ops without 16-bit kernels, and fp8."""

from collections.abc import Callable

import pytest
import torch
from programs import LOW, Function, captured, outputs, relative_error, rewritten, same_bits
from torch import Tensor
from torch.export import ExportedProgram

from enginecast.passes.canonicalize import _holds_exactly
from enginecast.verification.floor import LIMIT, least_floor

W = torch.randn(8, 8, generator=torch.Generator().manual_seed(1))
EYE = 8 * torch.eye(8)
fft, linalg = torch.fft, torch.linalg


def project(x: Tensor) -> Tensor:
    return x @ W.to(x.dtype)


def rotary(x: Tensor) -> Tensor:
    pairs = torch.view_as_complex(project(x).float().unflatten(-1, (4, 2)))
    angles = torch.outer(torch.arange(pairs.shape[-2]).float(), 1e4 ** -torch.arange(4.0))
    turned = pairs * torch.polar(torch.ones_like(angles), angles)
    return torch.view_as_real(turned).flatten(-2).type_as(x)


ISLANDS: dict[str, Callable[[Tensor], Tensor]] = {
    "rotary": lambda x: project(rotary(x)),
    "rfft": lambda x: fft.irfft(fft.rfft(project(x).float()) * 0.5, n=8).to(x.dtype) + x,
    "amplitudes": lambda x: project(fft.rfft(x.float(), n=14).abs().to(x.dtype)),
    "fft2": lambda x: fft.fft2(project(x).float()).real.type_as(x),
    "inverse": lambda x: linalg.inv(project(x).float() + EYE).to(x.dtype) @ x,
    "solve": lambda x: linalg.solve(project(x).float() + EYE, x.float()).to(x.dtype),
    "qr": lambda x: project(linalg.qr(project(x).float() + EYE)[1].abs().to(x.dtype)),
    "singular values": lambda x: linalg.svd(project(x).float() + EYE)[1].to(x.dtype),
    "stft": lambda x: (
        torch.stft(x.float().flatten(1), 8, window=torch.ones(8), return_complex=True)
        .abs()
        .to(x.dtype)
    ),
    "cumulated in fp64": lambda x: project(x).double().cumsum(-1).to(x.dtype),
}


@pytest.fixture(scope="module")
def islands() -> dict[str, ExportedProgram]:
    x = example()
    return {name: captured(Function(function), x) for name, function in ISLANDS.items()}


def example() -> Tensor:
    return torch.randn(2, 8, 8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("to", ["fp16", "bf16"])
@pytest.mark.parametrize("name", ISLANDS)
def test_what_has_no_16_bit_kernel_stays_in_fp32(
    islands: dict[str, ExportedProgram], name: str, to: str
) -> None:
    after, _ = rewritten(islands[name], f"unify-dtype{{to={to}}}")
    exact, _ = rewritten(islands[name], "unify-dtype{to=fp64}")
    (found,), (wanted,) = outputs(after, example()), outputs(exact, example())
    assert found.dtype == LOW[to]
    assert wanted.dtype == torch.float64
    own = relative_error(ISLANDS[name](example().to(LOW[to])), wanted)
    assert relative_error(found, wanted) <= LIMIT * max(own, least_floor(to))


F8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)


@pytest.mark.parametrize("dtype", F8)
def test_a_round_trip_through_fp8_rounds_in_every_precision(dtype: torch.dtype) -> None:
    def trip(x: Tensor) -> tuple[Tensor, Tensor]:
        low = x.to(dtype).to(x.dtype)
        return low + 1, x - low

    x = torch.randn(4, 8)
    before = captured(Function(trip), x)
    after, _ = rewritten(before, "canonicalize")
    assert same_bits(before, after, x)
    for to in ("fp16", "bf16"):
        low, _ = rewritten(before, f"unify-dtype{{to={to}}},canonicalize")
        rounded = x.to(LOW[to])
        for found, wanted in zip(outputs(low, rounded), trip(rounded), strict=True):
            assert torch.allclose(found.float(), wanted.float(), atol=least_floor(to) * 4)


def test_what_an_fp8_cast_loses_is_known() -> None:
    f8, f16, f32 = torch.float8_e4m3fn, torch.float16, torch.float32
    assert all(_holds_exactly(f32, dtype) and _holds_exactly(f16, dtype) for dtype in F8)
    assert not any(_holds_exactly(dtype, f16) for dtype in F8)
    assert not _holds_exactly(f8, torch.float8_e5m2)
    assert not _holds_exactly(torch.float8_e5m2, f8)
    assert _holds_exactly(f32, torch.bfloat16)
    assert not _holds_exactly(f16, torch.bfloat16)
    assert not _holds_exactly(torch.bfloat16, f16)
    stored = torch.randn(4).to(f8)
    before = captured(Function(lambda x: x.to(f32).to(f8).to(f32) * 2), stored)
    after, sites = rewritten(before, "canonicalize")
    assert len(sites) >= 1
    assert torch.equal(outputs(after, stored)[0], stored.float() * 2)
