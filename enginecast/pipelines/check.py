"""The whole check: the same prompt and seed by the eager pipeline and by that of engines.

Errors of the engines grow or shrink from step to step.  By how much is measured on the eager
pipeline: a run in which each output of each component gets noise of a known size.  What the engines
were found to be off times that factor is what their own errors make of the latents; a pipeline
that is further away than `MARGIN` times as much does something else than eager.

Where a plan quantizes, that explains much: guidance alone multiplies errors.  So its limit for one
call is the limit for the latents of each step, and thus for the final ones, too.
"""

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from enginecast.capture.sources.recording import METHODS, on_instance
from enginecast.pipelines.generate import Made

NOISE = 1e-3
"""Relative size of the noise: far above fp32's rounding, and small enough to act in proportion."""
MARGIN = 10
"""Errors of an engine are not noise: they may agree from step to step, and add up."""
LEAST = 1e-6
"""Relative error of a component in fp32 that nothing has to explain."""
MOST = 0.5
"""Relative error from which on latents are not those of the same picture, whatever explains it."""


@dataclass(frozen=True)
class Stage:
    """How far latents, or the pictures, of the two pipelines are apart."""

    name: str
    error: float
    """The largest relative error of a row of the batch."""
    limit: float

    @property
    def holds(self) -> bool:
        return self.error <= self.limit


@dataclass(frozen=True)
class WholeCheck:
    """Eager against engines."""

    steps: tuple[Stage, ...]
    pictures: Stage
    most: float
    """What no stage may be further off than, whatever explains it."""
    psnr: float | None
    """In dB, of pixels in 0..1, at the worst picture or frame; None: they are equal."""

    @property
    def worst(self) -> Stage:
        """The step with the largest error."""
        return max(self.steps or (self.pictures,), key=lambda stage: stage.error)

    @property
    def parts_at(self) -> str | None:
        """Where the pipelines begin to part: the first stage that is further off than it may."""
        return next((each.name for each in (*self.steps, self.pictures) if not each.holds), None)

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why the pipeline of engines is rejected."""
        found = next((each for each in (*self.steps, self.pictures) if not each.holds), None)
        if found is None:
            return ()
        by_plan = found.limit == self.most < MOST
        why = "the plans allow" if by_plan else "the engines explain"
        out = " (a smaller --max-error plans more exactly)" if by_plan else ""
        return (
            f"{found.name}: relative error {found.error:.2g}, and {why} {found.limit:.2g}{out}",
        )


def compare(
    eager: Made, noisy: Made, engines: Made, off: float, planned: float | None = None
) -> WholeCheck:
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
    steps = [
        _stage(f"step {number}", *each, off, most)
        for number, each in enumerate(
            zip(eager.latents, noisy.latents, engines.latents, strict=True), 1
        )
    ]
    pictures = _stage("pictures", eager.pictures, noisy.pictures, engines.pictures, off, most)
    return WholeCheck(tuple(steps), pictures, most, _psnr(eager.pictures, engines.pictures))


def _stage(
    name: str, eager: Tensor, noisy: Tensor, engines: Tensor, off: float, most: float
) -> Stage:
    grows = relative_error(eager, noisy) / NOISE
    limit = min(MARGIN * max(grows, 1.0) * max(off, LEAST), most)
    return Stage(name, relative_error(eager, engines), limit)


def relative_error(eager: Tensor, other: Tensor) -> float:
    """The largest of the rows; infinite where shapes differ or a value is not finite."""
    if eager.shape != other.shape:
        return math.inf
    rows, found = eager.flatten(1).double(), other.flatten(1).double()
    lengths = rows.norm(dim=1).clamp_min(1e-12)
    worst = float(((found - rows).norm(dim=1) / lengths).max())
    return worst if math.isfinite(worst) else math.inf


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

    with ExitStack() as stack:
        for part in pipe.components.values():
            if not isinstance(part, nn.Module):
                continue
            stack.callback(part.register_forward_hook(after).remove)
            for name in METHODS:
                plain = getattr(part, name, None)
                if callable(plain):
                    stack.enter_context(on_instance(part, name, _then(plain, noisy)))
        yield


def _then(plain: Any, noisy: Any) -> Any:
    def called(*args: Any, **kwargs: Any) -> Any:
        return tree_map_only(Tensor, noisy, plain(*args, **kwargs))

    return called
