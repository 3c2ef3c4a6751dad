"""Store and multiply the linears of a plan in fp8."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from enginecast.passes.ir.edit import dtype_of
from enginecast.passes.ir.quantization_plan import Format, LayerPlan
from enginecast.passes.quantize.layers import QuantizeLayers
from enginecast.passes.quantize.measure.quantizable import Layer
from enginecast.passes.quantize.plan.options import Mode, PlanOptions, options_of
from enginecast.passes.quantize.plan.scaled_mm_rules import check_scaled_mm, fp8_dtype

_ROWS = 16
"""Of the matrix that stands for what a layer reads: any number of rows will do."""


@dataclass(frozen=True)
class Fp8Matmul(QuantizeLayers):
    """Store weights in fp8, and multiply in fp8, where the plan says so."""

    name: ClassVar[str] = "fp8-matmul"
    format: ClassVar[Format] = "fp8"

    mode: Mode = "w8a8"
    arch: str = "cpu"
    max_error: float | None = None
    static: bool = False
    skip_modules_pattern: tuple[str, ...] = ()
    skip_modules_classes: tuple[str, ...] = ()

    @property
    def options(self) -> PlanOptions:
        # Whether it pays is what plan-fp8 is for.
        return options_of(self, format=self.format, min_gain=0.0)

    def dtype(self, arch: str) -> torch.dtype:
        return fp8_dtype(arch)

    def native_refusal(self, layer: Layer, plan: LayerPlan, arch: str) -> str:
        n, k = layer.shape
        dtype, out = self.dtype(arch), dtype_of(layer.node)
        by_row = "row" in (plan.weights, plan.activations)  # one scale is a row scale expanded
        sizes: tuple[tuple[int, ...], ...] = ((_ROWS, 1), (1, n)) if by_row else ((), ())
        x_scale, scale = (torch.empty(size, dtype=torch.float32, device="meta") for size in sizes)
        return check_scaled_mm(
            torch.empty((_ROWS, k), dtype=dtype, device="meta"),
            torch.empty((n, k), dtype=dtype, device="meta").t(),
            x_scale,
            scale,
            out_dtype=out,  # without the bias: it is added afterwards where no product takes it
            arch=arch,
        )
