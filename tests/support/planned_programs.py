"""Programs whose layers are all quantized in one form: shared by the tests of quantization."""

from typing import Any

from programs import calibrated, rewritten
from torch import Tensor
from torch.export import ExportedProgram

from enginecast.passes.ir.base import PassContext, Site
from enginecast.passes.ir.edit import structural_copy
from enginecast.passes.ir.quantization_plan import (
    Format,
    LayerPlan,
    QuantizationPlan,
    attach_plan,
)
from enginecast.passes.quantize.measure.quantizable import find_layers

FORMS: dict[str, dict[str, Any]] = {
    "storage": {"choice": "storage"},
    "blocks": {"choice": "storage", "weights": "block", "block": 32},
    "blocks of 4 bits": {"choice": "storage", "weights": "block", "block": 32, "bits": 4},
    "static": {"choice": "w8a8-static", "weights": "tensor", "activations": "tensor"},
    "tensorwise": {"choice": "w8a8-dynamic", "weights": "tensor", "activations": "tensor"},
    "rowwise": {"choice": "w8a8-dynamic", "activations": "row"},
    "rows by tensor": {"choice": "w8a8-dynamic", "activations": "tensor"},
    "both by blocks": {
        "choice": "w8a8-dynamic",
        "weights": "block",
        "block": 32,
        "activations": "block",
    },
}


def plan_for(
    program: ExportedProgram, form: str, format_: Format = "fp8", arch: str = "cpu", **changes: Any
) -> QuantizationPlan:
    """A plan that quantizes every layer in one of `FORMS`; tables and convs are stored."""
    layers = tuple(
        LayerPlan(
            module=layer.module,
            source=layer.source,
            ordinal=layer.ordinal,
            kind=layer.kind,
            weight=layer.name,
            shape=layer.shape,
            **(FORMS[form if layer.kind == "linear" else "storage"] | changes),
        )
        for layer in find_layers(program)
    )
    return QuantizationPlan(format=format_, arch=arch, max_error=1.0, layers=layers)


def carried_out(
    program: ExportedProgram,
    plan: QuantizationPlan,
    *inputs: Tensor,
    options: str = "",
    **context: Any,
) -> tuple[ExportedProgram, list[Site]]:
    """A copy of a program with a plan carried out, and its sites.

    Args:
        inputs: for calibration; none: no calibration.
        options: of the pass: "{scale_dtype=fp16}".
    """
    planned = structural_copy(program)
    attach_plan(planned, plan)
    known = calibrated(program, *inputs, **context) if inputs else PassContext(**context)
    return rewritten(planned, f"{plan.format}-matmul{options}", known)


def quantized_by_plan(
    program: ExportedProgram, form: str, format_: Format = "fp8", *inputs: Tensor
) -> ExportedProgram:
    """A copy of a program with all layers in one form; no layer may be left alone."""
    found, sites = carried_out(program, plan_for(program, form, format_), *inputs)
    left = [f"{site.module}: {site.reason}" for site in sites if not site.rewritten]
    assert not left, left
    return found
