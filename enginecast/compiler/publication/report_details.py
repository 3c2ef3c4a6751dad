"""Report sections besides the verdict: the origin of the bundle, and the quantization plan."""

import math
import os
from collections import Counter
from collections.abc import Mapping
from datetime import UTC, datetime

from enginecast.compiler.publication.manifest import PLAN_NAME
from enginecast.doctor.checks import Report as Machine
from enginecast.passes.ir.quantization_plan import LayerPlan, QuantizationPlan
from enginecast.verification.report.data import Origin, Plan, PlannedLayer
from enginecast.version import __version__

EPOCH = "SOURCE_DATE_EPOCH"
"""Environment variable with the build date, in seconds (reproducible-builds.org)."""
SCALE_BYTES = 4


def origin_of(machine: Machine, command: str, fingerprint: Mapping[str, str]) -> Origin:
    """The origin of a report that is written now."""
    epoch = os.environ.get(EPOCH, "")
    now = datetime.fromtimestamp(int(epoch), UTC) if epoch.isdecimal() else datetime.now(UTC)
    return Origin(
        enginecast=__version__,
        date=now.isoformat(timespec="seconds"),
        command=command,
        python=machine.python,
        platform=machine.platform,
        fingerprint=dict(fingerprint),
        packages={one.name: one.version for one in machine.packages if one.version is not None},
    )


def reported_plan(plan: QuantizationPlan, precision: str) -> Plan:
    """A quantization plan for the report, with the bytes of each layer.

    Args:
        precision: dtype of the computation, and of weights that are not quantized.
    """
    width = 4 if precision == "fp32" else 2
    return Plan(
        format=plan.format,
        arch=plan.arch,
        max_error=plan.max_error,
        predicted_error=plan.predicted_error,
        layers=tuple(_shown_layer(layer, width) for layer in plan.layers),
    )


def _shown_layer(layer: LayerPlan, width: int) -> PlannedLayer:
    before = math.prod(layer.shape) * width
    is_kept = layer.choice == "keep"
    return PlannedLayer(
        module=layer.module,
        kind=layer.kind,
        shape=layer.shape,
        choice=layer.choice,
        bits=layer.bits,
        scaling="" if is_kept else layer.weights,
        activations="" if is_kept else layer.activations or "",
        bytes_before=before,
        bytes=before if is_kept else _quantized_bytes(layer),
        error=layer.error,
        end_to_end=layer.end_to_end,
        gain=layer.gain,
        gain_from=layer.gain_from,
        reason=layer.reason,
    )


def _quantized_bytes(layer: LayerPlan) -> int:
    """Bytes of a quantized weight and its scales."""
    rows, count = layer.shape[0], math.prod(layer.shape)
    scales = {"tensor": 1, "row": rows}.get(layer.weights, 0)
    if layer.weights == "block":
        scales = rows * math.ceil(count / rows / max(layer.block, 1))
    return math.ceil(count * layer.value_bytes) + scales * SCALE_BYTES


def plan_notes(found: QuantizationPlan | None) -> tuple[str, ...]:
    """A quantization plan in one sentence, and how it was found; nothing without one."""
    if found is None:
        return ()
    choices = Counter(layer.choice for layer in found.layers)
    counts = ", ".join(f"{count} {choice}" for choice, count in sorted(choices.items()))
    predicted = found.predicted_error
    error = "" if predicted is None else f"predicted error {predicted:.2g}, "
    return (
        f"{found.format} plan for {found.arch}: {counts}; {error}allowed {found.max_error:.2g}"
        f" ({PLAN_NAME})",
        *found.notes,
    )
