"""Layers that a model's class keeps from low precision: what diffusers' own casting leaves."""

import pytest
import torch
from diffusers import ConfigMixin, ModelMixin
from diffusers.configuration_utils import register_to_config
from programs import calibrated, captured
from torch import Tensor, nn

from enginecast.passes.ir.pipeline import run_pipeline
from enginecast.passes.ir.quantization_plan import QuantizationPlan, plan_of
from enginecast.passes.registry import build


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.ModuleDict({"linear": nn.Linear(16, 32)})
        self.wo = nn.Linear(16, 16)
        self.proj_out = nn.Linear(16, 16)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        shift, scale = self.norm1["linear"](time)[:, None].chunk(2, -1)
        found: Tensor = self.proj_out(torch.tanh(self.wo(x * (1 + scale) + shift)))
        return x + found


class Within(ModelMixin, ConfigMixin):  # type: ignore[misc]
    """A model within the model: nobody asks what its class keeps."""

    @register_to_config  # type: ignore[untyped-decorator]
    def __init__(self) -> None:
        super().__init__()
        self.proj_in = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.proj_in(x)
        return found


class Denoiser(ModelMixin, ConfigMixin):  # type: ignore[misc]
    _skip_layerwise_casting_patterns = ["norm", "^time$"]  # noqa: RUF012 - as diffusers has it
    _keep_in_fp32_modules = ["wo"]  # noqa: RUF012

    @register_to_config  # type: ignore[untyped-decorator]
    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.proj_in = nn.Linear(16, 16)
        self.time = nn.Sequential(nn.Linear(16, 16), nn.SiLU())
        self.time_too = nn.Linear(16, 16)
        self.within = Within()
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.proj_out = nn.Linear(16, 16)

    def forward(self, sample: Tensor, time: Tensor) -> Tensor:
        x, time = self.proj_in(sample), self.time_too(self.time(time))
        for block in self.blocks:
            x = block(self.within(x), time)
        found: Tensor = torch.sin(self.proj_out(x))
        return found


def left_by_diffusers(model: ModelMixin) -> set[str]:
    model.enable_layerwise_casting(torch.float8_e4m3fn, torch.float32)
    kinds = (nn.Linear, nn.Conv2d, nn.Conv3d)
    layers = {name: each for name, each in model.named_modules() if isinstance(each, kinds)}
    return {name for name, layer in layers.items() if not hasattr(layer, "_diffusers_hook")}


def planned(module: nn.Module, spec: str) -> QuantizationPlan:
    inputs = torch.randn(2, 4, 16), torch.randn(2, 16)
    program = captured(module, *inputs)
    run_pipeline(build(spec), program, calibrated(program, *inputs))
    plan = plan_of(program)
    assert plan is not None
    return plan


@pytest.mark.parametrize("spec", ["plan-int8", "plan-fp8", "plan-fp8{mode=storage}"])
def test_a_plan_keeps_what_casting_by_diffusers_leaves(spec: str) -> None:
    plan = planned(Denoiser().eval().requires_grad_(False), spec)
    kept = {layer.module: layer.reason for layer in plan.layers if layer.choice == "keep"}
    assert kept.keys() == left_by_diffusers(Denoiser())
    assert kept["blocks.1.norm1.linear"] == (
        "Denoiser keeps 'norm' from low precision (sensitive=true quantizes it)"
    )
    assert "Denoiser keeps 'wo' from low precision: 2 layers" in plan.notes
    assert "Denoiser keeps '^proj_in$' from low precision: 1 layer" in plan.notes


def test_layers_that_are_asked_for_are_quantized_all_the_same() -> None:
    model = Denoiser().eval().requires_grad_(False)
    named = planned(model, 'plan-int8{include_modules="blocks.0.wo"}')
    choices = {layer.module: layer.choice for layer in named.layers}
    assert choices["blocks.0.wo"] != "keep"
    assert choices["blocks.1.wo"] == "keep"
    assert not any(
        layer.choice == "keep" for layer in planned(model, "plan-int8{sensitive=true}").layers
    )
