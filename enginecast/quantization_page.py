"""A quantisation plan on a terminal: equal decisions of repeated layers are one row."""

import re
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console

from enginecast.passes.plan_reasons import form_in_words
from enginecast.passes.quantization_plan import LayerPlan, QuantizationPlan
from enginecast.terminal import say, table

_INDEX = re.compile(r"(?<![^.])\d+(?![^.])")
"""The number of a layer in a module path."""
_NUMBER = re.compile(r"\d[\d.e+-]*")


def print_plan(plan: QuantizationPlan, console: Console) -> None:
    """What becomes of each layer, and of the whole."""
    error = "not measured" if plan.predicted_error is None else f"{plan.predicted_error:.3g}"
    head = f"{plan.format} plan for {plan.arch}: predicted error {error}"
    say(console, f"{head}, allowed {plan.max_error:.3g}")
    shown = table("layers", "n", "weight", "choice", "error", "outputs", "gain", "reason", whole=4)
    for group in grouped(plan.layers):
        first = max(group, key=lambda layer: layer.error or 0.0)
        shown.add_row(
            _INDEX.sub("*", first.module) if len(group) > 1 else first.module or "<root>",
            str(len(group)),
            " x ".join(map(str, first.shape)),
            "keep" if first.choice == "keep" else form_in_words(first),
            _number(max, (layer.error for layer in group)),
            _number(max, (layer.end_to_end for layer in group)),
            "" if first.choice == "keep" else _number(min, (layer.gain for layer in group)),
            first.reason,
        )
    console.print(shown)
    for note in plan.notes:
        say(console, note)


def grouped(layers: Iterable[LayerPlan]) -> list[Sequence[LayerPlan]]:
    """Layers that differ in the numbers of their modules, errors and gains alone, in order."""
    found: dict[tuple[object, ...], list[LayerPlan]] = {}
    for layer in layers:
        key = (
            _INDEX.sub("*", layer.module),
            layer.shape,
            layer.choice,
            form_in_words(layer),
            layer.block,
            _NUMBER.sub("#", layer.reason),
        )
        found.setdefault(key, []).append(layer)
    return list(found.values())


def _number(choose: Any, values: Iterable[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{choose(known):.2g}" if known else ""
