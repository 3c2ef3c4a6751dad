"""Estimate the disk and memory that an export needs, before it begins.

The figures are lower bounds: they count what is known to be needed, without the working memory of
the steps. So a refusal is never a guess, and an accepted export may still run out.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from enginecast.capture.sources.base.source import Source
from enginecast.capture.sources.weights.widened import NARROW
from enginecast.compiler.memory import anonymous
from enginecast.compiler.request import EngineConfig
from enginecast.errors import MissingError
from enginecast.exporters.registry import target_of
from enginecast.passes.ir.text import DTYPES
from enginecast.runtime.bundle.staging import require_space
from enginecast.runtime.device.machine import available

Elements = Mapping[torch.dtype, int]
"""Number of weight elements stored in each dtype."""

BESIDE_WEIGHTS = 64 << 20
"""Bytes on disk for the graph, the stored reference and the reports."""
IMPORTED = 600 << 20
"""Bytes of memory of a process that has imported torch, transformers and ONNX Runtime."""
SESSION = {"fp32": 3, "fp16": 2, "bf16": 2}
"""Bytes in memory per weight of a CPU session besides the mapped file: ONNX Runtime packs most fp32
weights for its kernels, and casts fp16 ones to fp32 while it runs (measured on T5 encoders)."""


@dataclass(frozen=True)
class Budget:
    """Lower bounds on the disk and memory of an export, in bytes."""

    disk: int
    memory: int
    why: str
    """What takes most of the memory."""


def estimate(
    elements: Elements, config: EngineConfig, *, in_memory: bool, maps_mixed: bool = False
) -> Budget:
    """Add up the known needs of an export.

    Args:
        in_memory: whether the weights are in memory rather than mapped from a file.
        maps_mixed: eager maps the weights from their file although they have several dtypes.
    """
    count = sum(elements.values())
    size = sum(number * dtype.itemsize for dtype, number in elements.items())
    phases = {
        f"eager in {name}": _eager(elements, name, maps_mixed)
        for name in sorted({"fp32", config.precision})
    }
    targets = [target_of(one.target) for one in config.engines]
    if "program" not in targets[0].takes:  # the reference is the model itself
        phases["eager in fp64"] = torch.float64.itemsize * count
    engines = zip(config.engines, targets, strict=True)
    if any(one.runs_here and target.holds_weights for one, target in engines):
        phases["running the engine here"] = SESSION[config.precision] * count
    why, most = max(phases.items(), key=lambda phase: phase[1])
    memory = IMPORTED + (size if in_memory else 0) + most
    copies = sum(target.copies for target in targets)
    return Budget(copies * count * DTYPES[config.precision].itemsize + BESIDE_WEIGHTS, memory, why)


def require(source: Source, config: EngineConfig, folder: Path) -> None:
    """Refuse an export that this machine cannot finish; `folder` will hold the bundle."""
    budget = estimate(
        source.weight_elements(), config, in_memory=source.in_memory, maps_mixed=source.maps_mixed
    )
    require_space(folder, budget.disk)
    there = available()
    if there is not None and budget.memory > there + anonymous():
        hint = "Use a machine with more memory."
        if config.runs_here and config.device == "cpu":
            hint = (
                "--device cuda plans the engine for a GPU: it is not run here, and the program is"
                " verified layer by layer."
            )
        raise MissingError(
            f"exporting {source.name} takes at least {budget.memory / 1e9:.1f} GB of memory, most"
            f" of it for {budget.why}; {there / 1e9:.1f} GB are free",
            hint=hint,
        )


def _eager(elements: Elements, name: str, maps_mixed: bool) -> int:
    """Bytes that the eager module needs besides mapped files (`sources.weights.widened`)."""
    dtype = DTYPES[name]
    mapped = {dtype, *NARROW} if dtype == torch.float32 else {dtype}
    others = set(elements) - mapped
    if not others and (maps_mixed or len(elements) == 1):
        return 0
    held = others if maps_mixed else set(elements)
    return dtype.itemsize * sum(elements[each] for each in held)
