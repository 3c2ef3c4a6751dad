"""Plan which layers are stored, or multiplied, in fp8."""

from dataclasses import dataclass
from typing import ClassVar

from enginecast.passes.plan_options import Mode, PlanOptions, Target
from enginecast.passes.plan_pass import PlanPass


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
        return PlanOptions(
            format="fp8",
            mode=self.mode,
            arch=self.arch,
            target=self.target,
            max_error=self.max_error,
            min_gain=self.min_gain,
            static=self.static,
            skip_modules=self.skip_modules,
            include_modules=self.include_modules,
            skip_modules_pattern=self.skip_modules_pattern,
            skip_modules_classes=self.skip_modules_classes,
            heads=self.heads,
            measure=self.measure,
        )
