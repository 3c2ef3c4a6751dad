"""The whole check: the same prompt and seed by the eager pipeline and by that of engines.

Errors of the engines grow or shrink from step to step.  By how much is measured on the eager
pipeline: a run in which each output of each component gets noise of a known size.  What the engines
were found to be off times that factor is what their own errors make of the latents; a pipeline
that is further away than `MARGIN` times as much does something else than eager.

Where a plan quantizes, that explains much: guidance alone multiplies errors.  So its limit for one
call is the limit for the latents of each step, and thus for the final ones, too.
"""

import math
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Final

import torch
from msgspec.structs import replace
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from enginecast.capture.sources.calls.recording import METHODS, on_instance
from enginecast.pipelines.generate import Made
from enginecast.pipelines.record import CheckOutcome, EngineOutcome, StageOutcome
from enginecast.runtime.bundle.manifest import Quantization, Verdict

EMULATED: Final = "verified-by-emulation"
NOT_ON_TARGET = "engines ran here, and not on their target"
NOISE = 1e-3
"""Relative size of the noise: far above fp32's rounding, and small enough to act in proportion."""
MARGIN = 10
"""Errors of an engine are not noise: they may agree from step to step, and add up."""
LEAST = 1e-6
"""Relative error of a component in fp32 that nothing has to explain."""
MOST = 0.5
"""Relative error from which on latents are not those of the same picture, whatever explains it."""


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
    eager: Made,
    noisy: Made,
    found: Made,
    engines: Collection[EngineOutcome],
    dtype: torch.dtype,
    allowed: float | None = None,
) -> CheckOutcome:
    """Compare runs of the eager pipeline, of the same with noise, and of that with engines.

    Args:
        dtype: of the eager pipeline.
        allowed: the largest error of latents that a user allows, in place of what plans allow.
    """
    off = max(engine.worst for engine in engines)
    planned = max((e.max_error for e in engines if e.max_error is not None), default=None)
    planned = planned if allowed is None else allowed
    check = replace(
        compare(eager, noisy, found, off, planned), dtype=str(dtype).removeprefix("torch.")
    )
    if check.reasons or all(engine.outcome != EMULATED for engine in engines):
        return check
    return replace(check, outcome=EMULATED, reasons=(NOT_ON_TARGET,))


def compare(
    eager: Made, noisy: Made, engines: Made, off: float, planned: float | None = None
) -> CheckOutcome:
    """Compare two runs.

    Args:
        eager: of the eager pipeline.
        noisy: of the same with `NOISE`.
        engines: of the pipeline of engines.
        off: the largest relative error of an engine.
        planned: the largest error that a plan allows one call of an engine, and so the latents;
            None: nothing is quantized.
    """
    most = MOST if planned is None else min(MOST, planned)

    def stage(name: str, plain: Tensor, with_noise: Tensor, found: Tensor) -> StageOutcome:
        grows = relative_error(plain, with_noise) / NOISE
        limit = min(MARGIN * max(grows, 1.0) * max(off, LEAST), most)
        error = relative_error(plain, found)
        return StageOutcome(name=name, error=error if math.isfinite(error) else None, limit=limit)

    latents = zip(eager.latents, noisy.latents, engines.latents, strict=True)
    steps = tuple(stage(f"step {number}", *each) for number, each in enumerate(latents, 1))
    pictures = stage("pictures", eager.pictures, noisy.pictures, engines.pictures)
    # Where the pipelines begin to part.
    parts = next((s for s in (*steps, pictures) if s.error is None or s.error > s.limit), None)
    reasons: tuple[str, ...] = ()
    if parts is not None:
        by_plan = parts.limit == most < MOST
        why = "the plans allow" if by_plan else "the engines explain"
        out = " (a smaller --max-error plans more exactly)" if by_plan else ""
        error = math.inf if parts.error is None else parts.error
        reasons = (f"{parts.name}: relative error {error:.2g}, and {why} {parts.limit:.2g}{out}",)
    worst = max(steps or (pictures,), key=lambda s: math.inf if s.error is None else s.error)
    rows = [
        row_errors(each, other) for each, other in zip(eager.latents, engines.latents, strict=True)
    ]
    return CheckOutcome(
        outcome="verified" if parts is None else "rejected",
        reasons=reasons,
        max_error=None if planned is None else most,
        steps=steps,
        pictures=pictures,
        psnr=_psnr(eager.pictures, engines.pictures),
        worst=worst.name,
        parts_at=None if parts is None else parts.name,
        prompts=tuple(_finite(max(each)) for each in zip(*rows, strict=True)),
    )


def relative_error(eager: Tensor, other: Tensor) -> float:
    """The largest of the rows; infinite where shapes differ or a value is not finite."""
    return max(row_errors(eager, other))


def row_errors(eager: Tensor, other: Tensor) -> list[float]:
    """Of each row; infinite where shapes differ or a value is not finite."""
    if eager.shape != other.shape:
        return [math.inf] * len(eager)
    rows, found = eager.flatten(1).double(), other.flatten(1).double()
    errors = (found - rows).norm(dim=1) / rows.norm(dim=1).clamp_min(1e-12)
    return [each if math.isfinite(each) else math.inf for each in errors.tolist()]


def _finite(error: float) -> float | None:
    return error if math.isfinite(error) else None


def _psnr(eager: Tensor, other: Tensor) -> float | None:
    if eager.shape != other.shape:
        return -math.inf
    squares = (eager.double() - other.double()).square().flatten(-3).mean(-1)
    worst = float(squares.max())
    return None if worst == 0 else -10 * math.log10(worst)


@contextmanager
def with_noise(pipe: Any, seed: int = 0) -> Iterator[None]:
    """Within the block, what components give has noise of `NOISE`, relative to each row."""
    draws = torch.Generator().manual_seed(seed)

    def noisy(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point() or not tensor.ndim:
            return tensor
        rows = tensor.float().flatten(1) if tensor.ndim > 1 else tensor.float()[:, None]
        size = rows.square().mean(1).sqrt().view(-1, *[1] * (tensor.ndim - 1))
        drawn = torch.randn(tensor.shape, generator=draws).to(tensor.device)
        return tensor + (drawn * size * NOISE).to(tensor.dtype)

    def after(module: nn.Module, given: Any, returned: Any) -> Any:
        return tree_map_only(Tensor, noisy, returned)

    def called(plain: Any, *args: Any, **kwargs: Any) -> Any:
        return tree_map_only(Tensor, noisy, plain(*args, **kwargs))

    with ExitStack() as stack:
        for part in pipe.components.values():
            if not isinstance(part, nn.Module):
                continue
            stack.callback(part.register_forward_hook(after).remove)
            for name in METHODS:
                plain = getattr(part, name, None)
                if callable(plain):
                    stack.enter_context(on_instance(part, name, partial(called, plain)))
        yield
