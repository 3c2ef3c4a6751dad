"""Compare a published bundle with eager fp32, on inputs and by a measure of its own.

Nothing here comes from `enginecast.verification`: a defect there must not hide here.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from enginecast.capture.inputs.examples import sample
from enginecast.capture.inputs.specs import DimSpec, InputSpec
from enginecast.capture.outputs.flatten import name_result
from enginecast.runtime.engine import Engine
from zoo.choices import with_choices

RELATIVE = 1e-3
"""Largest L2 distance, as a part of the output's own L2 norm: a hundred times what fp32 loses."""
PEAK = 1e-2
"""Largest difference of one value, as a part of the output's largest one."""
LEAST = 1e-6
"""What an output that is zero may be off by."""
WANTED = ({"batch": 2, "sequence": 11}, {"batch": 5, "sequence": 23}, {"batch": 1, "sequence": 5})
SEED = 977

Array = NDArray[Any]


@dataclass(frozen=True)
class Judgement:
    """What came of a bundle on fresh inputs."""

    wrong: tuple[str, ...]
    """How it differs from eager; empty: it agrees."""
    compared: int
    """Draws that eager ran, and that were compared."""


def judge(engine: Engine, eager: nn.Module, specs: Sequence[InputSpec]) -> Judgement:
    """Run both on inputs of shapes other than the traced one, and on that one with other values."""
    fitted = tuple(_fit(spec, engine) for spec in specs if _is_input(engine, spec.name))
    wrong: list[str] = []
    compared = 0
    for index, sizes in enumerate(_draws(fitted, engine)):
        feeds = sample(fitted, sizes, SEED + index)
        try:
            with torch.no_grad():
                wanted = name_result(eager(**feeds), inputs=feeds).tensors
        except Exception:  # not every size in a range need be one that the model's code takes
            continue
        compared += 1
        lines = list(_compare(engine, feeds, wanted))
        if lines and (tied := with_choices(engine, eager, feeds)) is not None:
            lines = list(_compare(engine, feeds, tied))
        wrong += [f"{dict(sizes)}: {line}" for line in lines]
    return Judgement(tuple(wrong), compared)


def _is_input(engine: Engine, name: str) -> bool:
    return any(found.name == name for found in engine.inputs)


def _fit(spec: InputSpec, engine: Engine) -> InputSpec:
    """The spec with the dimensions that the bundle declares."""
    shape = next(found.shape for found in engine.inputs if found.name == spec.name)
    dims = []
    for size, dim in zip(shape, spec.dims, strict=True):
        if isinstance(size, int):
            dims.append(DimSpec.static(size))
        else:
            low, high = engine.manifest.symbols[size]
            dims.append(replace(dim, name=size, minimum=low, maximum=high))
    return replace(spec, dims=tuple(dims))


def _draws(specs: Sequence[InputSpec], engine: Engine) -> Iterator[dict[str, int]]:
    examples = {d.name: d.size for spec in specs for d in spec.dims if d.name is not None}
    yield dict(examples)
    for step, wanted in enumerate(WANTED):
        sizes = {}
        for name, size in examples.items():
            low, high = engine.manifest.symbols[name]
            sizes[name] = min(max(wanted.get(name, size + step + 1), low), high)
        if sizes != examples:
            yield sizes


def _compare(
    engine: Engine, feeds: Mapping[str, Tensor], wanted: Mapping[str, Tensor]
) -> Iterator[str]:
    try:
        found = engine.run({n: t.numpy() for n, t in feeds.items()}, check_finite=False)
    except Exception as error:  # a shape in the declared range must run
        yield f"the engine does not run: {type(error).__name__}: {str(error)[:200]}"
        return
    mask = feeds.get("attention_mask")
    rows = mask.bool().numpy() if mask is not None and mask.ndim == 2 else None
    for name, array in found.items():
        if name not in wanted:
            yield f"{name}: eager has no such output"
            continue
        reason = difference(array, wanted[name].detach().numpy(), rows)
        if reason:
            yield f"{name}: {reason}"


def difference(found: Array, wanted: Array, rows: Array | None) -> str:
    """Say how two values of an output differ by more than rounding; empty when they do not.

    Args:
        found: of the engine.
        wanted: of eager fp32.
        rows: which rows are not padding, [batch, sequence]; None: all.
    """
    if found.shape != wanted.shape:
        return f"shape {list(found.shape)}, eager's is {list(wanted.shape)}"
    if rows is not None and wanted.shape[:2] == rows.shape:
        found, wanted = found[rows], wanted[rows]
    if wanted.dtype.kind in "biu":
        unequal = int((found != wanted).sum())
        return f"{unequal} of {wanted.size} values differ" if unequal else ""
    if not np.array_equal(np.isfinite(found), np.isfinite(wanted)):
        return "other values are not finite"
    keep = np.isfinite(wanted)
    exact, off = wanted[keep].astype(np.float64), 0.0
    distance = np.abs(found[keep].astype(np.float64) - exact)
    if not exact.size:
        return ""
    norm, peak = float(np.linalg.norm(exact)), float(np.abs(exact).max())
    off, most = float(np.linalg.norm(distance)), float(distance.max())
    if off > RELATIVE * norm + LEAST * np.sqrt(exact.size) * min(1.0, norm or 1.0):
        return f"relative L2 {off / max(norm, 1e-30):.2g}"
    return f"off by {most:.2g} of {peak:.2g}" if most > PEAK * peak + LEAST else ""
