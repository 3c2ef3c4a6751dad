"""Plan which layers to store, or multiply, in fp8."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from enginecast.passes.ir.quantization_plan import Format
from enginecast.passes.quantize.plan.options import DEFAULT_TARGET, Target
from enginecast.passes.quantize.plan.planning import PlanPass


@dataclass(frozen=True)
class PlanFp8(PlanPass):
    """Plan which layers are stored or multiplied in fp8; changes nothing yet."""

    name: ClassVar[str] = "plan-fp8"
    format: ClassVar[Format] = "fp8"

    target: Target = DEFAULT_TARGET
    bits: Literal[4, 8] = 8
    block: Literal[0, 32] = 0
