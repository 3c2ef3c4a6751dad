"""Plan which layers to store, or multiply, in int8."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from enginecast.passes.ir.quantization_plan import Format
from enginecast.passes.quantize.plan.options import DEFAULT_TARGET, Target
from enginecast.passes.quantize.plan.planning import PlanPass


@dataclass(frozen=True)
class PlanInt8(PlanPass):
    """Plan which layers are stored or multiplied in int8; changes nothing yet."""

    name: ClassVar[str] = "plan-int8"
    format: ClassVar[Format] = "int8"

    bits: Literal[4, 8] = 8
    integers: bool = False
    any_cpu: bool = True
    target: Target = DEFAULT_TARGET
