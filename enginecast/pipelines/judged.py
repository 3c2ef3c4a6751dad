"""What the whole check says, for the record: engines in a pipeline against the eager one."""

import math
from collections.abc import Collection
from typing import Final, Literal

import torch

from enginecast.pipelines.check import Stage, compare
from enginecast.pipelines.generate import Made
from enginecast.pipelines.record import CheckOutcome, EngineOutcome, StageOutcome
from enginecast.runtime.bundle.manifest import Quantization, Verdict

EMULATED: Final = "verified-by-emulation"
NOT_ON_TARGET = "engines ran here, and not on their target"


def engine_outcome(
    verdict: Verdict, quantization: Quantization | None, notes: tuple[str, ...] = ()
) -> EngineOutcome:
    """An engine that was not rejected."""
    return EngineOutcome(
        outcome=EMULATED if verdict.outcome == EMULATED else "verified",
        error=max((output.error or 0.0 for output in verdict.outputs), default=0.0),
        errors=verdict.errors,
        max_error=None if quantization is None else quantization.max_error,
        notes=notes,
    )


def whole_outcome(
    eager: Made, noisy: Made, found: Made, engines: Collection[EngineOutcome], dtype: torch.dtype
) -> CheckOutcome:
    """Compare runs of the eager pipeline, of the same with noise, and of that with engines.

    Args:
        dtype: of the eager pipeline.
    """
    off = max(engine.worst for engine in engines)
    planned = max((e.max_error for e in engines if e.max_error is not None), default=None)
    check = compare(eager, noisy, found, off, planned)
    emulated = any(engine.outcome == EMULATED for engine in engines)
    held: Literal["verified", "verified-by-emulation"] = EMULATED if emulated else "verified"
    return CheckOutcome(
        outcome="rejected" if check.reasons else held,
        reasons=check.reasons or ((NOT_ON_TARGET,) if emulated else ()),
        dtype=str(dtype).removeprefix("torch."),
        max_error=None if planned is None else check.most,
        steps=tuple(_described(each) for each in check.steps),
        pictures=_described(check.pictures),
        psnr=check.psnr,
        worst=check.worst.name,
        parts_at=check.parts_at,
    )


def _described(found: Stage) -> StageOutcome:
    error = found.error if math.isfinite(found.error) else None
    return StageOutcome(name=found.name, error=error, limit=found.limit)
