"""Store and multiply the linears of a plan in int8, or store them in int4."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from enginecast.passes.ir.quantization_plan import Format
from enginecast.passes.quantize.layers import QuantizeLayers


@dataclass(frozen=True)
class Int8Matmul(QuantizeLayers):
    """Store weights in int8 or int4, and multiply in int8, where the plan says so."""

    name: ClassVar[str] = "int8-matmul"
    format: ClassVar[Format] = "int8"

    bits: Literal[4, 8] = 8

    def dtype(self, arch: str) -> torch.dtype:
        return torch.int8
