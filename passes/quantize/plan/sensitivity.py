"""How much each layer loses when it is quantized: alone at its own output, and at the program's.

One exact run over all calibration inputs measures every form of every layer on what the layer
really reads.  A second kind of run has one variant of the program for each layer, with that layer
alone in its fastest form; variants run side by side on a few small inputs, and whatever a variant
has in common with the exact program is computed once.

Layers in the same place of equal blocks are counterparts.  A variant has a quarter of them at once,
neighbors in depth, so that forty blocks take as many variants as four.  What a variant loses is
split by the layers' own errors; one whose own error is unlike those of its counterparts, since its
weights or inputs have other ranges, has a variant of its own.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil, hypot, prod
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import Node

from enginecast.errors import PassError
from enginecast.passes.ir.base import PassContext
from enginecast.passes.ir.interpret import Run, named
from enginecast.passes.ir.quantization_plan import LayerPlan, QuantizationPlan
from enginecast.passes.ir.regions import repeated_regions
from enginecast.passes.ir.source import module_path, source_line
from enginecast.passes.quantize.measure.calibration import (
    ErrorSum,
    largest_row_error,
    masks_of,
    valid_rows,
)
from enginecast.passes.quantize.measure.quantizable import Tail, tail_of
from enginecast.passes.quantize.measure.simulate import Rounding
from enginecast.passes.quantize.measure.spans import static_spans
from enginecast.progress import counted

Choices = Mapping[Node, Sequence[LayerPlan]]
"""For each layer the forms that it may take, fastest first."""

MOST_PRODUCTS = 2e12
"""Multiplications in linears that all variants of a program may take, in all."""
ENOUGH = 64
"""Positions that count which the cases must have that stand for the others: where the worst row
decides, a few rows say little."""
FEW = 16
"""Positions with which a case is worth a run of its own."""
AT_ONCE = 16
"""Variants that run side by side."""
PARTS = 4
"""Variants for the counterparts of a layer."""
UNLIKE = 1.5
"""Times the median error of its counterparts, or less than one over it, that make a layer unlike
them."""


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
    sizes: dict[Node, float]
    """L2 norm of that error in the fastest form."""
    readings: dict[Node, Reading]
    end_to_end: dict[Node, float] = field(default_factory=dict)
    """Of `measure_alone`; empty where it was not needed or would take too long."""
    variants: int = 0
    """How many it took."""


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
        rounding = Rounding(plan, static_spans(program, context, forms))
        run = _Isolated(program, context, choices, rounding)
        outputs = [named(found, None) for found in run.results()]
        errors = {node: [total.relative for total in sums] for node, sums in run.sums.items()}
        sizes = {node: sums[0].absolute for node, sums in run.sums.items()}
    return Sensitivity(outputs, errors, sizes, run.readings)


def measure_alone(
    program: ExportedProgram,
    context: PassContext,
    plan: QuantizationPlan,
    choices: Choices,
    found: Sensitivity,
) -> None:
    """Add to `found` what each layer, alone quantized in its fastest form, does to the outputs of
    the program: the error of the worst row of one; nothing where that would take too long.

    Args:
        plan: as for `measure`.
        found: of `measure`.
    """
    sizes = found.sizes
    variants = _variants(program, sizes)
    places = _few_cases(context)
    elements = _sizes(context)
    # Decided by sizes and not by a clock, so that equal calls give equal plans.
    products = sum(read.rows * prod(choices[n][0].shape) for n, read in found.readings.items())
    share = sum(elements[place] for place in places) / max(elements)
    if products * share * len(variants) / 2 > MOST_PRODUCTS:
        return
    fastest = {node: known[0] for node, known in choices.items()}
    cases = [context.calibration[place] for place in places]
    masks = [masks_of(context)[place] for place in places]
    reached: list[float] = []
    with torch.no_grad():
        rounding = Rounding(plan, static_spans(program, context, fastest.items()))
        layers = [{node: fastest[node] for node in variant} for variant in variants]
        for start in counted(range(0, len(variants), AT_ONCE), "groups of variants"):
            run = _Variants(program, cases, layers[start : start + AT_ONCE], rounding)
            outputs = [named(results, None) for results in run.results()]
            reached += [
                largest_row_error(outputs[at : at + len(cases)], outputs[: len(cases)], masks)
                for at in range(len(cases), len(outputs), len(cases))
            ]
    for variant, error in zip(variants, reached, strict=True):
        whole = hypot(*(sizes[node] for node in variant)) or 1.0
        found.end_to_end |= {node: error * sizes[node] / whole for node in variant}
    found.variants = len(variants)


def _variants(program: ExportedProgram, sizes: Mapping[Node, float]) -> list[list[Node]]:
    """The layers, those together that are tried at once."""
    variants: list[list[Node]] = []
    for regions in repeated_regions(program):
        for counterparts in zip(*(region.nodes for region in regions), strict=True):
            if counterparts[0] not in sizes:
                continue
            usual = median(sizes[node] for node in counterparts)
            alike = [n for n in counterparts if usual <= UNLIKE * sizes[n] <= UNLIKE**2 * usual]
            size = ceil(len(alike) / PARTS)
            variants += [alike[at : at + size] for at in range(0, len(alike), max(size, 1))]
    together = {node for variant in variants for node in variant}
    return [*variants, *([node] for node in sizes if node not in together)]


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
        first = exact if isinstance(exact, Tensor) else exact[0]  # of a recurrence
        is_conv = forms[0].kind.startswith("conv")
        mask = self._masks[case] if forms[0].kind in ("linear", "embedding") else None
        tail = tail_of(node) if is_conv else Tail(node)
        wanted = valid_rows(tail.clamped(first), mask)
        if not bool(wanted.isfinite().all()):
            place = f"{module_path(node) or 'the model itself'} {source_line(node)}".strip()
            raise PassError(
                f"values at {place} are not finite before anything is quantized",
                hint="Look for calibration inputs that the model cannot take.",
            )
        if forms[0].kind not in ("linear", "embedding"):
            known = self.readings.get(node, Reading())
            channels = 1 - len(forms[0].shape) if is_conv else -1
            positions = first.numel() // first.shape[channels]
            self.readings[node] = replace(known, rows=max(known.rows, positions))
        if forms[0].kind == "linear":
            rows = valid_rows(values[0], mask)
            if rows.numel():
                known, sizes = self.readings.get(node, Reading()), rows.abs()
                self.readings[node] = Reading(
                    max(known.rows, values[0].numel() // values[0].shape[-1]),
                    max(known.largest, float(sizes.max())),
                    max(known.mean, float(sizes.double().mean())),
                )
            if mask is not None and values[0].dim() > mask.dim():
                # What a row gives, it gives without the others, too.
                values, mask = (rows, *values[1:]), None
        sums = self.sums.setdefault(node, [ErrorSum() for _ in forms])
        for form, total in zip(forms, sums, strict=True):
            rounded = self._rounding.output(node, form, values)
            rounded = tail.clamped(rounded if isinstance(rounded, Tensor) else rounded[0])
            total.add(valid_rows(rounded, mask), wanted)
        return exact


def _sizes(context: PassContext) -> list[int]:
    return [sum(value.numel() for value in case.values()) for case in context.calibration]


def _few_cases(context: PassContext) -> list[int]:
    """The smallest cases that have enough positions between them; those with few come last."""
    sizes = _sizes(context)
    counts = [ENOUGH if mask is None else int(mask.sum()) for mask in masks_of(context)]
    chosen: list[int] = []
    for place in sorted(range(len(sizes)), key=lambda at: (-min(counts[at], FEW), sizes[at], at)):
        if sum(counts[known] for known in chosen) < ENOUGH:
            chosen.append(place)
    return chosen


class _Variants(Run):
    """The exact program over the cases, and the same once more for each variant, with its layers
    quantized.
    """

    def __init__(
        self,
        program: ExportedProgram,
        cases: Sequence[Mapping[str, Tensor]],
        variants: Sequence[Mapping[Node, LayerPlan]],
        rounding: Rounding,
    ) -> None:
        super().__init__(program, [*cases] * (len(variants) + 1))
        self._count = len(cases)
        self._layers: list[Mapping[Node, LayerPlan]] = [{}, *variants]
        self._rounding = rounding

    def evaluate(self, node: Node, case: int) -> Any:
        variant, exact = divmod(case, self._count)
        form = self._layers[variant].get(node)
        if form is not None:
            values, _ = self.fetch_args_kwargs_from_env(node)
            return self._rounding.output(node, form, values)
        is_outer = node.graph is self._program.graph  # what a block computes is not kept
        shareable = is_outer and node.op == "call_function"
        own, known = self._own[case], self._own[exact]
        if (
            variant
            and shareable
            and all(  # that it reads is what the exact program has
                source in self._weights or own[source] is known[source]
                for source in node.all_input_nodes
            )
        ):
            return known[node]
        return super().evaluate(node, case)
