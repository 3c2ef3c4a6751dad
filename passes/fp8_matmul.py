"""Store and multiply the linears of a plan in fp8."""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from enginecast.passes.ir.edit import dtype_of
from enginecast.passes.ir.quantization_plan import Format, LayerPlan
from enginecast.passes.quantize.layers import QuantizeLayers
from enginecast.passes.quantize.measure.quantizable import Layer
from enginecast.passes.quantize.plan.options import PlanOptions
from enginecast.passes.quantize.plan.scaled_mm_rules import fp8_dtype, refusal


@dataclass(frozen=True)
class Fp8Matmul(QuantizeLayers):
    """Store weights in fp8, and multiply in fp8, where the plan says so."""

    name: ClassVar[str] = "fp8-matmul"
    format: ClassVar[Format] = "fp8"

    @property
    def options(self) -> PlanOptions:
        return replace(super().options, min_gain=0.0)  # whether it pays is what plan-fp8 is for

    def dtype(self, arch: str) -> torch.dtype:
        return fp8_dtype(arch)

    def native_refusal(self, layer: Layer, plan: LayerPlan, arch: str) -> str:
        n, k = layer.shape
        by_row = "row" in (plan.weights, plan.activations)  # one scale is a row scale expanded
        return refusal(n, k, dtype_of(layer.node), by_row=by_row, arch=arch)
