"""Plan which layers are stored, or multiplied, in fp8."""

from dataclasses import dataclass
from typing import ClassVar

from enginecast.passes.quantize.plan.options import Mode, PlanOptions, Target, options_of
from enginecast.passes.quantize.plan.plan_pass import PlanPass


@dataclass(frozen=True)
class PlanFp8(PlanPass):
    """Plan which layers are stored or multiplied in fp8; changes nothing yet."""

    name: ClassVar[str] = "plan-fp8"

    mode: Mode = "w8a8"
    arch: str = "cpu"
    target: Target = "aotinductor"
    max_error: float | None = None
    min_gain: float | None = None
    static: bool = False
    skip_modules: tuple[str, ...] = ()
    include_modules: tuple[str, ...] = ()
    skip_modules_pattern: tuple[str, ...] = ()
    skip_modules_classes: tuple[str, ...] = ()
    heads: bool = False
    measure: bool = True

    def __post_init__(self) -> None:
        _ = self.options  # checks the values

    @property
    def options(self) -> PlanOptions:
        return options_of(self, format="fp8")
