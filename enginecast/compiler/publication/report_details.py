"""Report sections besides the verdict: the origin of the bundle, and the quantization plan."""

import math
import os
import re
from collections import Counter
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

from torch import Tensor
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from enginecast.capture.inputs.given import given_prompts
from enginecast.compiler.engines.lower_and_run import dtype_name
from enginecast.compiler.publication.manifest import PLAN_NAME
from enginecast.doctor.checks import Report as Machine
from enginecast.passes.ir.deferred_weights import deferred_weights
from enginecast.passes.ir.quantization_plan import LayerPlan, QuantizationPlan, plan_of
from enginecast.passes.ir.text import DTYPES
from enginecast.verification.report.data import Origin, Plan, PlannedLayer, StoredWeights
from enginecast.verification.report.strip import block_of
from enginecast.version import __version__

EPOCH = "SOURCE_DATE_EPOCH"
"""Environment variable with the build date, in seconds (reproducible-builds.org)."""
SCALE_BYTES = 4
PROMPT = 100
"""Most characters of a prompt."""
MODULES = 1000
"""Most modules whose weights are listed; of more, those of a block are one."""
_PRECISIONS = {dtype: name for name, dtype in DTYPES.items()}
_PART = re.compile(r"\.\d+$")
"""What follows a weight's name in those of its further tensors."""


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


def shown_prompts(prompts: Path | None) -> tuple[str, ...]:
    """The beginnings of the prompts in a file."""
    texts = () if prompts is None else given_prompts(prompts)
    return tuple(t if len(t) <= PROMPT else f"{t[: PROMPT - 1].rstrip()}…" for t in texts)


def stored_weights(program: ExportedProgram) -> tuple[StoredWeights, ...]:
    """What the weights of each module take in an engine, and in which precision.

    Args:
        program: after the lowering passes of the engine.
    """
    plan, deferred = plan_of(program), deferred_weights(program)
    planned = {} if plan is None else {x.weight: x for x in plan.layers if x.choice != "keep"}
    nodes = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    found = Counter[tuple[str, str]]()
    for spec in program.graph_signature.input_specs:
        if spec.kind not in (InputKind.PARAMETER, InputKind.BUFFER) and spec.target not in deferred:
            continue
        value = deferred.get(spec.target) or nodes[spec.arg.name].meta["val"]
        name = value.name if not isinstance(value, Tensor) else str(spec.target)
        whole = stem if (stem := _PART.sub("", name)) in planned else name
        layer = planned.get(whole)
        precision = _PRECISIONS.get(value.dtype, dtype_name(value.dtype))
        size = value.size if not isinstance(value, Tensor) else value.nbytes
        if plan is not None and layer is not None:
            kind = plan.format_of(layer)
            precision = f"{kind}-storage" if layer.choice == "storage" else kind
            if layer.bits == 4 and math.prod(value.shape) == math.prod(layer.shape):
                size = math.ceil(size * layer.value_bytes)  # two in a byte, once they are written
        found[whole.rpartition(".")[0], precision] += size
    if len(found) > MODULES:
        blocks = Counter[tuple[str, str]]()
        for (module, precision), size in found.items():
            blocks[block_of(module), precision] += size
        found = blocks
    return tuple(StoredWeights(*key, size) for key, size in found.items())


def plan_notes(found: QuantizationPlan | None) -> tuple[str, ...]:
    """A quantization plan in one sentence, and how it was found; nothing without one."""
    if found is None:
        return ()
    choices = Counter(
        layer.choice
        if found.format_of(layer) == found.format
        else f"{found.format_of(layer)}-{layer.choice}"
        for layer in found.layers
    )
    counts = ", ".join(f"{count} {choice}" for choice, count in sorted(choices.items()))
    predicted = found.predicted_error
    error = "" if predicted is None else f"predicted error {predicted:.2g}, "
    return (
        f"{found.format} plan for {found.arch}: {counts}; {error}allowed {found.max_error:.2g}"
        f" ({PLAN_NAME})",
        *found.notes,
    )
