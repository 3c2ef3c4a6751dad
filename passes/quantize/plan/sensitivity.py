"""How much each layer loses when it is quantized: alone at its own output, and at the program's.

One exact run over all calibration inputs measures every form of every layer on what the layer
really reads.  A second kind of run has one variant of the program for each form of each layer, with
that layer alone quantized; variants run side by side on a small input, and whatever a variant has
in common with the exact program is computed once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import Node

from enginecast.errors import PassError
from enginecast.passes.ir.base import PassContext
from enginecast.passes.ir.interpret import Run, named
from enginecast.passes.ir.quantization_plan import LayerPlan, QuantizationPlan
from enginecast.passes.ir.source import module_path, source_line
from enginecast.passes.quantize.measure.calibration import (
    ErrorSum,
    largest_output_error,
    masks_of,
    valid_rows,
)
from enginecast.passes.quantize.measure.simulate import Rounding, static_ranges

Choices = Mapping[Node, Sequence[LayerPlan]]
"""For each layer the forms that it may take, fastest first."""

MOST_PRODUCTS = 2e12
"""Multiplications in linears that all variants of a program may take, in all."""
ENOUGH = 16
"""Positions that count which a case must have to stand for the others."""
AT_ONCE = 16
"""Variants that run side by side."""


@dataclass(frozen=True)
class Reading:
    """What a linear read in the exact run, in the rows that count."""

    rows: int = 0
    """Most rows in one case, all counted."""
    largest: float = 0.0
    mean: float = 0.0
    """Of magnitudes; in the case where it is largest."""

    @property
    def peak(self) -> float:
        """The largest magnitude over the mean one."""
        return self.largest / self.mean if self.mean else 0.0


@dataclass
class Sensitivity:
    """What was measured."""

    outputs: list[dict[str, Tensor]]
    """Exact, for each case."""
    errors: dict[Node, list[float]]
    """Relative error of each layer's own output, for each of its forms."""
    readings: dict[Node, Reading]
    end_to_end: dict[Node, list[float]] = field(default_factory=dict)
    """Of `measure_alone`; empty where it was not needed or would take too long."""


def measure(
    program: ExportedProgram, context: PassContext, plan: QuantizationPlan, choices: Choices
) -> Sensitivity:
    """Measure every form of every layer on the calibration inputs.

    Args:
        plan: gives format and architecture; its layers do not count.

    Raises:
        PassError: what a layer reads or gives is not finite, before anything is rounded.
    """
    with torch.no_grad():
        forms = ((node, form) for node, known in choices.items() for form in known)
        rounding = Rounding(plan, static_ranges(program, context, forms))
        run = _Isolated(program, context, choices, rounding)
        outputs = [named(found, None) for found in run.results()]
        errors = {node: [total.relative for total in sums] for node, sums in run.sums.items()}
    return Sensitivity(outputs, errors, run.readings)


def measure_alone(
    program: ExportedProgram,
    context: PassContext,
    plan: QuantizationPlan,
    choices: Choices,
    readings: Mapping[Node, Reading],
) -> dict[Node, list[float]]:
    """What each form of each layer, alone quantized, does to the outputs of the program.

    Args:
        plan: as for `measure`.
        readings: of `measure`.

    Returns:
        Relative errors of the outputs; nothing where that would take too long.
    """
    if not _is_affordable(context, choices, readings):
        return {}
    with torch.no_grad():
        forms = ((node, form) for node, known in choices.items() for form in known)
        rounding = Rounding(plan, static_ranges(program, context, forms))
        return _alone(program, context, choices, rounding)


class _Isolated(Run):
    """The exact program; each layer is also computed in all its forms."""

    def __init__(
        self,
        program: ExportedProgram,
        context: PassContext,
        choices: Choices,
        rounding: Rounding,
    ) -> None:
        super().__init__(program, context.calibration)
        self._choices = choices
        self._masks = masks_of(context)
        self._rounding = rounding
        self.sums: dict[Node, list[ErrorSum]] = {}
        self.readings: dict[Node, Reading] = {}

    def evaluate(self, node: Node, case: int) -> Any:
        exact = super().evaluate(node, case)
        forms = self._choices.get(node)
        if not forms:
            return exact
        values, _ = self.fetch_args_kwargs_from_env(node)
        # A convolution has channels where the mask has tokens.
        mask = self._masks[case] if forms[0].kind != "conv" else None
        wanted = valid_rows(exact, mask)
        if not bool(wanted.isfinite().all()):
            place = f"{module_path(node) or 'the model itself'} {source_line(node)}".strip()
            raise PassError(
                f"values at {place} are not finite before anything is quantized",
                hint="Look for calibration inputs that the model cannot take.",
            )
        sums = self.sums.setdefault(node, [ErrorSum() for _ in forms])
        for form, total in zip(forms, sums, strict=True):
            total.add(valid_rows(self._rounding.output(node, form, values), mask), wanted)
        if forms[0].kind == "linear":
            self._read(node, values[0], mask)
        return exact

    def _read(self, node: Node, x: Tensor, mask: Tensor | None) -> None:
        known, rows = self.readings.get(node, Reading()), valid_rows(x, mask)
        if not rows.numel():
            return
        sizes = rows.abs()
        self.readings[node] = Reading(
            max(known.rows, x.numel() // x.shape[-1]),
            max(known.largest, float(sizes.max())),
            max(known.mean, float(sizes.double().mean())),
        )


def _is_affordable(
    context: PassContext, choices: Choices, readings: Mapping[Node, Reading]
) -> bool:
    """Decided by sizes and not by a clock, so that equal calls give equal plans."""
    sizes = _sizes(context)
    products = sum(reading.rows * prod(choices[n][0].shape) for n, reading in readings.items())
    share = sizes[_small_case(context)] / max(sizes)
    variants = sum(map(len, choices.values()))
    return products * share * variants / 2 <= MOST_PRODUCTS


def _sizes(context: PassContext) -> list[int]:
    return [sum(value.numel() for value in case.values()) for case in context.calibration]


def _small_case(context: PassContext) -> int:
    """The smallest case with enough positions that count, or the one with most of them."""
    counts = [
        ENOUGH if mask is None else min(int(mask.sum()), ENOUGH) for mask in masks_of(context)
    ]
    sizes = _sizes(context)
    return min(range(len(sizes)), key=lambda place: (-counts[place], sizes[place], place))


def _alone(
    program: ExportedProgram, context: PassContext, choices: Choices, rounding: Rounding
) -> dict[Node, list[float]]:
    place = _small_case(context)
    case, mask = context.calibration[place], masks_of(context)[place]
    variants = [(node, form) for node, forms in choices.items() for form in forms]
    found: dict[Node, list[float]] = {node: [] for node in choices}
    for start in range(0, len(variants), AT_ONCE):
        some = variants[start : start + AT_ONCE]
        run = _Variants(program, case, some, rounding)
        exact, *others = (named(results, None) for results in run.results())
        for (node, _), outputs in zip(some, others, strict=True):
            found[node].append(largest_output_error([outputs], [exact], [mask]))
    return found


class _Variants(Run):
    """The exact program as the first case, and one case for each layer with it quantized."""

    def __init__(
        self,
        program: ExportedProgram,
        inputs: Mapping[str, Tensor],
        layers: Sequence[tuple[Node, LayerPlan]],
        rounding: Rounding,
    ) -> None:
        super().__init__(program, [inputs] * (len(layers) + 1))
        self._layers = [(None, None), *layers]
        self._rounding = rounding

    def evaluate(self, node: Node, case: int) -> Any:
        layer, form = self._layers[case]
        if layer is node and form is not None:
            values, _ = self.fetch_args_kwargs_from_env(node)
            return self._rounding.output(node, form, values)
        is_outer = node.graph is self._program.graph  # what a block computes is not kept
        shareable = is_outer and node.op == "call_function"
        if case and shareable and self._is_exact(node, case):
            return self._own[0][node]
        return super().evaluate(node, case)

    def _is_exact(self, node: Node, case: int) -> bool:
        """Whether all that a node reads is what the exact program has."""
        own, exact = self._own[case], self._own[0]
        return all(
            source in self._weights or own[source] is exact[source]
            for source in node.all_input_nodes
        )
