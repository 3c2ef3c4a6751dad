"""The quantisation plan of an export: the one that was given, and the one that was carried out."""

from collections import Counter
from pathlib import Path

import msgspec

from enginecast.capture.source import Source
from enginecast.passes.plan_file import check_model, read_plan, write_plan
from enginecast.passes.quantization_plan import QuantizationPlan
from enginecast.plan import Plan
from enginecast.runtime.manifest import Quantization

PLAN_NAME = "plan.json"
"""The plan of a quantised bundle, in its folder."""


def given_plan(plan: Plan, source: Source) -> QuantizationPlan | None:
    """The plan file of an export.

    Raises:
        InputError: the file is no plan.
        UsageError: it was made for another model.
    """
    if plan.file is None:
        return None
    given = read_plan(plan.file)
    check_model(given, source.fingerprint(), plan.file)
    return given


def save_plan(path: Path, plan: QuantizationPlan, source: Source) -> None:
    """Write a plan, with the fingerprint of its model."""
    write_plan(path, msgspec.structs.replace(plan, model=source.fingerprint()))


def plan_notes(found: QuantizationPlan | None) -> tuple[str, ...]:
    """A plan in one sentence; none without one."""
    if found is None:
        return ()
    choices = Counter(layer.choice for layer in found.layers)
    told = ", ".join(f"{count} {choice}" for choice, count in sorted(choices.items()))
    predicted = found.predicted_error
    error = "" if predicted is None else f"predicted error {predicted:.2g}, "
    return (
        f"{found.format} plan for {found.arch}: {told}; {error}allowed {found.max_error:.2g}"
        f" ({PLAN_NAME})",
    )


def describe_plan(plan: Plan, found: QuantizationPlan | None) -> Quantization | None:
    """What the manifest says of a plan."""
    if found is None:
        return None
    return Quantization(
        precision=plan.name,
        format=found.format,
        arch=found.arch,
        max_error=found.max_error,
        predicted_error=found.predicted_error,
        plan=PLAN_NAME,
    )
