"""What a reader should know of a verdict beside its outcome."""

from collections.abc import Iterator

from enginecast.runtime.manifest import Where
from enginecast.verify.comparison import Comparison, Floor


def where_notes(
    dtype: str,
    where: Where,
    measured: Comparison | None,
    emulated: Comparison | None,
    engine_ran: bool,
) -> Iterator[str]:
    if engine_ran:
        return
    if measured is None or not where.provider:
        yield "the engine has not run"
    else:
        yield f"the engine ran on {where.provider}, which does not compute in {dtype}"
    if emulated is not None:
        yield f"the program was judged in true {dtype} arithmetic"


def floor_notes(floor: Floor) -> Iterator[str]:
    if floor.rounding:
        yield (
            f"eager {floor.label}: eager's own error and that of the plan's {floor.rounding}"
            " rounding, as it was simulated before the rewriting"
        )
    if floor.estimated:
        cause = floor.culprit or "values leave fp16's range"
        yield f"eager fp16 is no measure ({cause}): an eighth of eager bf16's error is taken"
