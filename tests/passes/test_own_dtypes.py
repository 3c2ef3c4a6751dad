"""Dtypes that the model's own code asks for: fp32 around ops without 16-bit kernels, fp8, and casts
around loud values, as code for mixed precision has them.
"""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from programs import LOW, Function, captured, outputs, relative_error, rewritten, same_bits
from torch import Tensor, nn
from torch.export import ExportedProgram

from enginecast.capture.sources.open_source import open_source
from enginecast.compiler.engines.rewrite import rewrite
from enginecast.compiler.prepare.program import prepare
from enginecast.compiler.prepare.reference import reference_of
from enginecast.compiler.request import ModelOptions
from enginecast.compiler.steps import Steps
from enginecast.passes.canonicalize import _holds_exactly
from enginecast.passes.presets import preset
from enginecast.passes.registry import build
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


LOUD = 2e5


class Loud(nn.Module):
    """A loud channel, a norm that reads it as code for mixed precision does, and a head."""

    def __init__(self, read: str, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.read = read
        self.first, self.norm, self.head = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4)
        with torch.no_grad():
            self.first.bias[1] = LOUD
            self.first.weight *= 100
        self.to(dtype)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        if self.read in ("bfloat16", "float16"):
            with torch.autocast("cpu", dtype=getattr(torch, self.read)):
                found: Tensor = self.head(self.norm(self.first(x * scale)))
                return found.float()
        h = self.first(x * scale.to(x.dtype))  # the scale of a latent comes in fp32
        if self.read == "off":  # with weights in fp32, as autocast leaves them
            with torch.autocast("cpu", enabled=False):
                n = self.norm(h.float()).to(h.dtype)
            found = self.head(n)
            return found
        n = nn.functional.layer_norm(h.float(), (16,)).type_as(h)
        if self.read == "half":
            n = (n.half() * 1.001).to(h.dtype)
        if self.read == "residual":
            n = self.norm((h.float() + n.float()).type_as(h))
        found = self.head(n)
        return found


AMP: dict[str, tuple[Callable[[], nn.Module], dict[str, Tensor]]] = {
    **{
        read: (partial(Loud, read), {"x": torch.randn(3, 8), "scale": torch.ones(1)})
        for read in ("bfloat16", "float16", "off", "half", "residual")
    },
    "stored in bf16": (
        partial(Loud, "scores", torch.bfloat16),
        {"x": torch.randn(3, 8).bfloat16(), "scale": torch.ones(1)},
    ),
    "loud input": (
        partial(Loud, "scores"),
        {"x": torch.randn(3, 8), "scale": torch.full((1,), LOUD)},
    ),
}


@pytest.mark.parametrize("name", AMP)
def test_casts_of_the_model_do_not_cost_it_its_protection(name: str) -> None:
    make, example = AMP[name]
    ready = prepare(open_source(make().eval(), example=example), ModelOptions(), Steps())
    reference = reference_of(ready, "fp16")
    assert reference.floor.autocast is (name == "off")
    found = rewrite(ready, build(preset("fp16")), reference, Steps())
    assert (found.failures, found.problems) == ((), ())
    assert found.emulated is not None
    assert found.emulated.emulation.overflow is None


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
