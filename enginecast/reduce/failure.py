"""What is wrong with a pass on a program, so that it is known again on a smaller one."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from enginecast.compiler.request import computed_dtype
from enginecast.errors import EnginecastError
from enginecast.passes.ir.base import Pass
from enginecast.reduce.specimen import Specimen
from enginecast.testing import Comparison, run_passes
from enginecast.verification.metrics import BEYOND

KEPT = 0.1
"""Of the error over its floor, what must be left of a broken promise: rounding breaks some, too."""
MOST = 100.0
"""Times its floor, past which any error is large."""


@dataclass(frozen=True)
class Failure:
    """How passes fail.  Equal failures are failures of one kind."""

    pass_name: str
    kind: str
    """The type of the exception, or "broken promise", or "not finite"."""
    where: str = ""
    """FILE:LINE of the pass, for an exception."""
    message: str = field(default="", compare=False)
    ratio: float = field(default=0.0, compare=False)
    """The error over its floor, for a broken promise."""

    def is_like(self, other: "Failure | None") -> bool:
        """Whether another is of this kind, and not by rounding alone."""
        if other is None or other != self:
            return False
        return other.ratio >= min(self.ratio, MOST) * KEPT


def examine(specimen: Specimen, passes: Sequence[Pass]) -> Failure | None:
    """How the passes fail on a specimen; None: they do not, or torch.export or eager does.

    The last is blamed for a broken promise: a caller tries those before it first.
    """
    try:
        captured = specimen.capture()
        comparison = Comparison(captured)
        comparison.run_eager(computed_dtype(passes))
    except Exception:  # of torch.export, of an op that does not take what is left
        return None
    try:
        check = comparison.compare(run_passes(captured, passes))
    except EnginecastError as error:
        named = [one.name for one in passes if f"pass '{one.name}'" in error.message]
        at = error.details
        where = f"{at['file']}:{at['line']}" if "file" in at else ""
        kind = type(error.__cause__ or error).__name__
        return Failure([*named, passes[-1].name][0], kind, where, error.message)
    if not check.failure:
        return None
    lost = check.worst_error is None or check.worst_error >= BEYOND
    kind = "not finite" if lost else "broken promise"
    ratio = MOST if check.worst_ratio is None else check.worst_ratio
    return Failure(passes[-1].name, kind, "", f"pass {check.failure}", ratio)
