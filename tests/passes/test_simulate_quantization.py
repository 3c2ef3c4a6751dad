"""The simulation of a plan against theory, against torch's fp8 and against our operators."""

from typing import Any

import pytest
import torch
from programs import captured, relative_error
from torch import Tensor, nn

from enginecast.passes.ir.quantization_plan import QuantizationPlan, Scaling
from enginecast.passes.quantize.measure.quantizable import find_layers
from enginecast.passes.quantize.measure.simulate import (
    E4M3,
    E4M3_FNUZ,
    Grid,
    simulate,
)
from enginecast.passes.quantize.plan.forms import planned

FP8 = torch.float8_e4m3fn
OPS = torch.ops.enginecast


def form_of(choice: str, weights: str = "row", activations: str | None = None, **more: Any) -> Any:
    """The arguments of `planned`."""
    return {"choice": choice, "weights": weights, "activations": activations, **more}


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("grid", "dtype"), [(E4M3, FP8), (E4M3_FNUZ, torch.float8_e4m3fnuz)], ids=["fn", "fnuz"]
)
def test_grid_is_torchs(grid: Grid, dtype: torch.dtype) -> None:
    bits = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    points = bits[bits.isfinite()].unique()
    assert points.max() == grid.limit
    ties = (points[1:] + points[:-1]) / 2
    spread = normal(50_000) * torch.logspace(-6, 2, 50_000)
    x = torch.cat([points, ties, spread.clamp(-grid.limit, grid.limit), torch.zeros(1)])
    assert torch.equal(grid.round(x), x.to(dtype).float())


class One(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Any:
        return self.layer(x)


def simulated(layer: nn.Module, x: Tensor, form: dict[str, Any], quantized: Any = "fp8") -> Tensor:
    program = captured(One(layer), x)
    (found,) = find_layers(program)
    plan = QuantizationPlan(
        format=quantized, arch="cpu", max_error=1.0, layers=(planned(found, **form),)
    )
    return simulate(program, plan, [{"x": x}])[0]["output_0"]


def linear(n: int, k: int, dtype: torch.dtype = torch.float32) -> nn.Linear:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return nn.Linear(k, n).to(dtype).requires_grad_(False)


@pytest.mark.parametrize(
    ("form", "quantized", "least", "most"),
    [
        (form_of("w8a8-dynamic", "tensor", "tensor"), "fp8", 0.036, 0.040),
        (form_of("w8a8-dynamic", "row", "row"), "fp8", 0.034, 0.038),
        (form_of("w8a8-static", "tensor", "tensor"), "fp8", 0.036, 0.040),
        (form_of("storage"), "fp8", 0.024, 0.028),
        (form_of("w8a8-dynamic", "row", "row"), "int8", 0.009, 0.013),
        (form_of("storage", "block", block=32), "int8", 0.004, 0.007),
        (form_of("storage", "block", bits=4, block=32), "int8", 0.08, 0.12),
    ],
    ids=str,
)
def test_error_of_a_linear(form: dict[str, Any], quantized: str, least: float, most: float) -> None:
    layer = nn.Linear(256, 256, bias=False).requires_grad_(False)
    layer.weight.copy_(normal(256, 256, seed=2))
    x = normal(512, 256)
    assert least <= relative_error(simulated(layer, x, form, quantized), layer(x)) <= most


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("per_row", [True, False], ids=["row", "tensor"])
def test_w8a8_is_what_the_operators_give(dtype: torch.dtype, per_row: bool) -> None:
    layer, x = linear(48, 64, dtype), normal(3, 7, 64).to(dtype)
    x[..., 5] *= 30
    by: Scaling = "row" if per_row else "tensor"
    found = simulated(layer, x, form_of("w8a8-dynamic", by, by))
    scale = OPS.dynamic_scale(x, FP8, per_row)
    weight_scale = OPS.dynamic_scale(layer.weight, FP8, per_row)
    quantized = OPS.quantize(layer.weight, weight_scale, FP8)
    wanted = OPS.quantized_linear(
        OPS.quantize(x, scale, FP8), scale, quantized, weight_scale, layer.bias, dtype
    )
    assert found.dtype == dtype
    assert relative_error(found, wanted) < {torch.float32: 1e-6}.get(dtype, 2e-3)
