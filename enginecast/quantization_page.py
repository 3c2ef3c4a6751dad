"""A quantisation plan on a terminal."""

from rich.console import Console

from enginecast.passes.plan_pass import in_words
from enginecast.passes.quantization_plan import QuantizationPlan
from enginecast.terminal import table


def print_plan(plan: QuantizationPlan, console: Console) -> None:
    """One row for each layer."""
    shown = table("layer", "weight", "choice", "reason")
    for layer in plan.layers:
        shape = " x ".join(map(str, layer.shape))
        choice = "keep" if layer.choice == "keep" else in_words(layer)
        shown.add_row(layer.module, shape, choice, layer.reason)
    console.print(shown)
