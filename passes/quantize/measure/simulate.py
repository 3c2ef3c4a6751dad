"""Run a program as if a plan had been carried out, before anything is rewritten.

The layers of a plan compute with rounded values, all else as it is.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import Node
from torch.nn import functional

from enginecast.passes.ir.base import PassContext
from enginecast.passes.ir.edit import first_input
from enginecast.passes.ir.interpret import Run, named
from enginecast.passes.ir.quantization_plan import Format, LayerPlan, QuantizationPlan, Scaling
from enginecast.passes.quantize.measure.quantizable import (
    RECURRENT,
    Recurrence,
    channels_first,
    find_layers,
    integer_values,
    is_product_of_integers,
    origin_in_order,
    recurrence_of,
    tail_of,
    transposed_geometry_of,
)
from enginecast.passes.quantize.measure.spans import Span, static_spans

FLOOR = 2.0**-40
"""Of a scale: a row of zeros has one, too."""
FNUZ = frozenset({"gfx942"})
"""Architectures whose fp8 is e4m3fnuz."""


@dataclass(frozen=True)
class Grid:
    """The values that a format has."""

    limit: float
    round: Callable[[Tensor], Tensor]
    """fp32 within +-limit to the nearest value of the format, ties to even."""
    scales: Callable[[Tensor], Tensor] = lambda wanted: wanted
    """The scales that there are, for those with which the largest value just fits."""


E4M3 = Grid(448.0, lambda x: x.to(torch.float8_e4m3fn).float())
E4M3_FNUZ = Grid(240.0, lambda x: x.to(torch.float8_e4m3fnuz).float())


_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_BETWEEN = (_E2M1[1:] + _E2M1[:-1]) / 2
_BETWEEN[1::2] = _BETWEEN[1::2].nextafter(_E2M1[0])  # a tie goes to the even place: here up


def _to_e2m1(x: Tensor) -> Tensor:
    return _E2M1[torch.bucketize(x.abs(), _BETWEEN)].copysign(x)


def _up_to_powers(wanted: Tensor) -> Tensor:
    fractions, exponents = torch.frexp(wanted)  # of [0.5, 1)
    return torch.ldexp(torch.ones_like(wanted), exponents - (fractions == 0.5).int())


def _nvfp4_scales(wanted: Tensor) -> Tensor:
    outer = _up_to_powers(wanted.amax() / E4M3.limit).clamp(min=2.0**-14)
    return E4M3.round((wanted / outer).clamp(2.0**-9, E4M3.limit)) * outer


NVFP4 = Grid(6.0, _to_e2m1, _nvfp4_scales)
MXFP8 = Grid(448.0, E4M3.round, _up_to_powers)


def grid_of(quantized: Format, arch: str, bits: int, block: int = 0) -> Grid:
    """The values of a format on an architecture; of weights also those of scales of blocks."""
    if quantized == "fp8" and block:
        return NVFP4 if bits == 4 else MXFP8
    if quantized == "fp8":
        return E4M3_FNUZ if arch in FNUZ else E4M3
    return Grid(2.0 ** (bits - 1) - 1, torch.round)


def fake(x: Tensor, grid: Grid, scaling: Scaling, block: int, largest: Tensor | None) -> Tensor:
    """x rounded to a grid and brought back, in fp32.

    Args:
        x: [..., K]; a weight that is scaled by rows has its rows first: [N, ...].
        scaling: what shares one scale: all of x, each vector along the last dim, or each `block`
            values of it.
        largest: max |x| to go by instead of x's own; None: x's own.
    """
    wide = x.float()
    if scaling == "block":
        wide = wide.unflatten(-1, (-1, block))
    if largest is None:
        sizes = wide.abs()
        largest = sizes.amax() if scaling == "tensor" else sizes.amax(-1, keepdim=True)
    scale = grid.scales((largest.float() / grid.limit).clamp(min=FLOOR))
    rounded = grid.round((wide / scale).clamp(-grid.limit, grid.limit)) * scale
    return rounded.flatten(-2) if scaling == "block" else rounded


def fake_weight(weight: Tensor, plan: LayerPlan, grid: Grid) -> Tensor:
    """A weight as the layer reads it after the rewriting; fp32 values.

    Args:
        weight: [N, K], [rows, size] or [out, in, kernel...].
    """
    rows = weight.flatten(1)
    largest = None
    if plan.bits == 7 and not plan.kind.startswith("conv"):
        # Two neighbors share the range of one, so that the sum of their products fits.
        pairs = functional.pad(rows, [0, rows.shape[1] % 2]).float().unflatten(1, (-1, 2))
        sums = torch.maximum(pairs.clamp(min=0).sum(-1), -pairs.clamp(max=0).sum(-1))
        largest = sums.amax() if plan.weights == "tensor" else sums.amax(1, keepdim=True)
        grid = Grid(127.0, torch.round)
    rounded = fake(rows, grid, plan.weights, plan.block, largest).view(weight.shape)
    # What is stored is brought back to the dtype of the layer, and read from there.
    is_whole = plan.choice == "storage" and plan.weights != "block"
    return rounded.to(weight.dtype).float() if is_whole else rounded


UNSIGNED = 255


def fake_unsigned(x: Tensor, span: Span) -> Tensor:
    """x on the 256 steps over a span, which are widened to hold 0 as one of them; fp32.

    With a scale for each channel 0 is the lowest step or the one in the middle.
    """
    low, high = min(span.low, 0.0), max(span.high, 0.0)
    if span.channels is not None:
        below = 0 if low == 0 else UNSIGNED // 2 + 1
        size = span.channels.float().reshape(-1, *[1] * (x.dim() - 2))
        step = (size / (UNSIGNED - below)).clamp(min=FLOOR)
        return (x.float() / step).round().clamp(-below, UNSIGNED - below) * step
    step = torch.tensor(max((high - low) / UNSIGNED, FLOOR))  # fp32
    below = int((-low / step).round().clamp(0, UNSIGNED))
    steps = (x.float() / step).round().clamp(-below, UNSIGNED - below)
    return steps * step


def fake_recurrence(
    x: Tensor, start: Sequence[Tensor], recurrence: Recurrence
) -> tuple[Tensor, ...]:
    """An LSTM or a GRU in int8: x and, at each step, the state are rounded with one scale for all
    rows.

    Args:
        x: [S, B, I], or [B, S, I] with batches first.
        start: [layers * directions, B, H]: the states and, of an LSTM, the cells.
        recurrence: with rounded weights.

    Returns:
        As the op of torch.
    """
    rows = x.transpose(0, 1) if recurrence.batch_first else x
    ends: list[tuple[Tensor, ...]] = []
    for layer in recurrence.steps:
        read, results = _fake_whole(rows), []
        for backward, weights in enumerate(layer):
            places = range(len(rows))
            state, *cell = (first[len(ends)] for first in start)
            outputs = [state] * len(rows)
            for place in reversed(places) if backward else places:
                given = functional.linear(read[place], weights[0], *weights[2:3])
                held = functional.linear(_fake_whole(state), weights[1], *weights[3:4])
                if cell:
                    enters, forgets, new, leaves = (given + held).chunk(4, -1)
                    cell = [forgets.sigmoid() * cell[0] + enters.sigmoid() * new.tanh()]
                    state = leaves.sigmoid() * cell[0].tanh()
                else:
                    resets, updates, new = given.chunk(3, -1)
                    kept = held.chunk(3, -1)
                    new = (new + (resets + kept[0]).sigmoid() * kept[2]).tanh()
                    state = new + (updates + kept[1]).sigmoid() * (state - new)
                outputs[place] = state
            results.append(torch.stack(outputs))
            ends.append((state, *cell))
        rows = torch.cat(results, -1)
    last = rows.transpose(0, 1) if recurrence.batch_first else rows
    return last, *map(torch.stack, zip(*ends, strict=True))


def _fake_whole(x: Tensor) -> Tensor:
    low, high = x.aminmax()
    return fake_unsigned(x, Span(float(low), float(high)))


def simulate(
    program: ExportedProgram,
    plan: QuantizationPlan,
    cases: Sequence[Mapping[str, Tensor]],
    names: Sequence[str] | None = None,
    mask_input: str | None = None,
    calibration: Sequence[Mapping[str, Tensor]] | None = None,
) -> list[dict[str, Tensor]]:
    """The outputs of a program with a plan carried out.

    Args:
        program: the one that the plan was made for, in fp32, fp16 or bf16; layers that the plan
            does not name, and those that it keeps, compute as they are.
        cases: inputs by placeholder name.
        names: of the tensor outputs, in order; None: `interpret.output_names`.
        mask_input: the input that marks the rows that static scales are taken from; None: all.
        calibration: the inputs that static scales are taken from; None: `cases`.

    Returns:
        For each case the tensor outputs by name.

    Raises:
        InputError: an input is missing, or `names` does not fit.
    """
    with torch.no_grad():
        known = cases if calibration is None else calibration
        context = PassContext(calibration=tuple(known), mask_input=mask_input)
        results = Simulation(program, plan, context, cases).results()
    return [named(found, names) for found in results]


class Rounding:
    """Computes layers with rounded values; keeps the rounded weights of the last layer."""

    def __init__(self, plan: QuantizationPlan, spans: Mapping[Node, Span]) -> None:
        """
        Args:
            spans: of `static_spans`.
        """
        self._plan = plan
        self._spans = spans
        self._last: Node | None = None
        self._weights: dict[LayerPlan, Tensor] = {}

    def output(self, node: Node, layer: LayerPlan, values: Sequence[Any]) -> Any:
        """What a layer gives: a tensor, or of a recurrence what it returns.

        Args:
            values: the arguments of the node.
        """
        assert callable(node.target)
        if layer.kind == "linear":
            x, bias = values[0], values[2] if len(values) > 2 else None
            read = x.float()
            if layer.activations is not None:
                largest = None
                if layer.choice == "w8a8-static":
                    largest = torch.tensor(self._spans[first_input(node)].largest)
                grid = grid_of(self._plan.format, self._plan.arch, 8)
                read = fake(x, grid, layer.activations, layer.block, largest)
            bias = None if bias is None else bias.float()
            return functional.linear(read, self._weight(node, layer, values[1]), bias).to(x.dtype)
        if layer.kind in RECURRENT:
            grid = grid_of(self._plan.format, self._plan.arch, layer.bits)
            weights = [fake_weight(w, layer, grid) if w.dim() == 2 else w for w in values[2]]
            if layer.choice == "storage":
                return node.target(*values[:2], weights, *values[3:])
            start = values[1] if layer.kind == "lstm" else [values[1]]
            return fake_recurrence(values[0], start, recurrence_of(node, weights))
        place = 0 if layer.kind == "embedding" else 1
        weight = self._weight(node, layer, values[place]).to(values[place].dtype)
        if is_product_of_integers(layer):
            read = self.held(values[0], origin_in_order(first_input(node)))
            values = (read, *values[1:])
        elif layer.signed:
            grid = grid_of(self._plan.format, self._plan.arch, 8)
            largest = torch.tensor(self._spans[first_input(node)].largest)
            read = fake(values[0], grid, "tensor", 0, largest).to(values[0].dtype)
            values = (read, *values[1:])
        result: Tensor = node.target(*values[:place], weight, *values[place + 1 :], **node.kwargs)
        return self.held(result, tail_of(node).node) if is_product_of_integers(layer) else result

    def held(self, tensor: Tensor, node: Node) -> Tensor:
        """A value as the unsigned integers that hold it say it."""
        return fake_unsigned(tensor, self._spans[node]).to(tensor.dtype)

    def _weight(self, node: Node, layer: LayerPlan, weight: Tensor) -> Tensor:
        """The same for all cases of a run, which come one after the other."""
        if node is not self._last:
            self._last = node
            self._weights.clear()
        if layer not in self._weights:
            grid = grid_of(self._plan.format, self._plan.arch, layer.bits, layer.block)
            if layer.kind == "conv-transpose" and is_product_of_integers(layer):
                groups = transposed_geometry_of(node).groups
                rows = fake_weight(channels_first(weight, groups), layer, grid)
                self._weights[layer] = channels_first(rows, groups)
            elif layer.kind == "conv-transpose" and layer.signed:  # one for each it gives
                rows = fake_weight(weight.transpose(0, 1), layer, grid)
                self._weights[layer] = rows.transpose(0, 1)
            else:
                self._weights[layer] = fake_weight(weight, layer, grid)
        return self._weights[layer]


class Simulation(Run):
    """One run with the layers of a plan rounded."""

    def __init__(
        self,
        program: ExportedProgram,
        plan: QuantizationPlan,
        context: PassContext,
        cases: Sequence[Mapping[str, Tensor]],
    ) -> None:
        """
        Args:
            context: with the inputs that static scales are taken from.
            cases: that it is run on.
        """
        super().__init__(program, cases)
        decisions = plan.by_site()
        found = ((layer.node, decisions.get(layer.key)) for layer in find_layers(program))
        self._layers = {
            node: d for node, d in found if d is not None and d.choice != "keep" and not d.given
        }
        spans = static_spans(program, context, self._layers.items())
        self._rounding = Rounding(plan, spans)
        held = integer_values(program.graph, self._layers)
        self._sums = {tail for tail, one in held.items() if one.made_by not in self._layers}
        self._rounded = {
            held[tail].made_by: [
                origin_in_order(side) for side in held[tail].made_by.args if isinstance(side, Node)
            ]
            for tail in self._sums
        }
        """What a sum adds, where it comes from: what is not held in integers is rounded for it."""
        self._held = held.keys()

    def evaluate(self, node: Node, case: int) -> Any:
        layer = self._layers.get(node)
        if layer is not None:
            values, _ = self.fetch_args_kwargs_from_env(node)
            return self._rounding.output(node, layer, values)
        if node in self._rounded:
            values, _ = self.fetch_args_kwargs_from_env(node)
            left, right = (
                value if origin in self._held else self._rounding.held(value, origin)
                for value, origin in zip(values, self._rounded[node], strict=True)
            )
            result = left + right
        else:
            result = super().evaluate(node, case)
        return self._rounding.held(result, node) if node in self._sums else result
