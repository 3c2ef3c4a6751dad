"""Store and multiply the linears of a plan in int8, or store them in int4."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from enginecast.passes.ir.quantization_plan import Format, LayerPlan
from enginecast.passes.quantize.layers import QuantizeLayers
from enginecast.passes.quantize.measure.quantizable import Layer
from enginecast.passes.quantize.plan.options import Mode, PlanOptions, options_of


@dataclass(frozen=True)
class Int8Matmul(QuantizeLayers):
    """Store weights in int8 or int4, and multiply in int8, where the plan says so."""

    name: ClassVar[str] = "int8-matmul"
    format: ClassVar[Format] = "int8"

    mode: Mode = "w8a8"
    bits: Literal[4, 8] = 8
    arch: str = "cpu"
    max_error: float | None = None
    static: bool = False
    skip_modules_pattern: tuple[str, ...] = ()
    skip_modules_classes: tuple[str, ...] = ()

    @property
    def options(self) -> PlanOptions:
        return options_of(self, format=self.format)

    def dtype(self, arch: str) -> torch.dtype:
        return torch.int8

    def native_refusal(self, layer: Layer, plan: LayerPlan, arch: str) -> str:
        return ""  # an integer product takes any sizes
