"""A plan's decisions in words."""

from collections.abc import Sequence
from typing import Any

from enginecast.passes.calibration import BEYOND
from enginecast.passes.plan_search import Found
from enginecast.passes.quantization_plan import LayerPlan
from enginecast.passes.sensitivity import Reading, Sensitivity

LOUD = 30.0
"""Peak over mean magnitude that a reader should know of; of normal values it is about 5."""


def reason_of(forms: Sequence[LayerPlan], place: int, reading: Reading | None) -> str:
    """Why a layer got the form at a place; past the last one, why it is kept.

    Args:
        forms: that it could take, fastest first, with their errors.
    """
    refused = forms[:place]
    if not refused:
        return ""
    left = "; ".join(_lost(form) for form in refused)
    peak = ""
    if reading is not None and reading.peak >= LOUD:
        peak = f"; it reads values up to {reading.largest:.3g}, {reading.peak:.0f} times their mean"
    return f"not within max_error: {left}{peak}"


def _lost(form: LayerPlan) -> str:
    """What a form would lose: "by tensor 0.084, alone 0.03 of the outputs"."""
    alone = "" if form.end_to_end is None else f" ({form.end_to_end:.2g} of the outputs)"
    error = "" if form.error is None else f" loses {form.error:.2g}{alone}"
    return f"{form_in_words(form)}{error}"


def form_in_words(form: LayerPlan) -> str:
    """A form in short: "w8a8-dynamic row/tensor", "storage block of 4 bits"."""
    scales = form.weights if form.activations is None else f"{form.weights}/{form.activations}"
    bits = f" of {form.bits} bits" if form.choice == "storage" and form.bits != 8 else ""
    return f"{form.choice} {scales}{bits}"


def found_in_words(search: Found[Any], found: Sensitivity, cases: int) -> tuple[str, ...]:
    """How a plan was found, in sentences."""
    by = "their effect on the outputs" if found.end_to_end else "the error of their own output"
    first = "every layer in its fastest form: " + (
        f"error {search.first:.3g}" if search.first < BEYOND else "a row of an output is lost"
    )
    if not search.moves:
        return (f"{first}, measured on {cases} calibration inputs",)
    return (
        f"{first}, which is not within max_error",
        f"{search.moves} steps to more exact forms, ordered by {by} over the time they cost: error"
        f" {search.error:.3g}, found in {search.runs} simulations of the whole on {cases}"
        " calibration inputs",
    )
