"""Run a program as if a plan had been carried out, before anything is rewritten.

The layers of a plan compute with rounded values (`fake_quantization`), all else as it is.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import Node

from enginecast.passes.activation_ranges import activation_ranges
from enginecast.passes.base import PassContext
from enginecast.passes.fake_quantization import fake_linear, fake_weight, grid_of
from enginecast.passes.graph_edit import first_input
from enginecast.passes.interpret import Run, named
from enginecast.passes.quantizable import find_layers
from enginecast.passes.quantization_plan import LayerPlan, QuantizationPlan


def simulate(
    program: ExportedProgram,
    plan: QuantizationPlan,
    cases: Sequence[Mapping[str, Tensor]],
    names: Sequence[str] | None = None,
    mask_input: str | None = None,
) -> list[dict[str, Tensor]]:
    """The outputs of a program with a plan carried out.

    Args:
        program: the one that the plan was made for, in fp32, fp16 or bf16; layers that the plan
            does not name, and those that it keeps, compute as they are.
        plan: what is rounded.  Static scales are taken from `cases`.
        cases: inputs by placeholder name.
        names: of the tensor outputs, in order; None: `interpret.output_names`.
        mask_input: the input that marks the rows that static scales are taken from; None: all.

    Returns:
        For each case the tensor outputs by name.

    Raises:
        InputError: an input is missing, or `names` does not fit.
    """
    with torch.no_grad():
        context = PassContext(calibration=tuple(cases), mask_input=mask_input)
        results = Simulation(program, plan, context).results()
    return [named(found, names) for found in results]


def planned_layers(program: ExportedProgram, plan: QuantizationPlan) -> dict[Node, LayerPlan]:
    """The layers of a program that a plan quantises."""
    decisions = plan.by_site()
    found = {layer.node: decisions.get(layer.key) for layer in find_layers(program)}
    return {node: d for node, d in found.items() if d is not None and d.choice != "keep"}


class Rounding:
    """Computes layers with rounded values; keeps the rounded weight of the last layer."""

    def __init__(self, plan: QuantizationPlan, largest: Mapping[Node, float]) -> None:
        self._plan = plan
        self._largest = largest
        self._last: tuple[object, Tensor | None] = (None, None)

    def output(self, node: Node, layer: LayerPlan, values: Sequence[Any]) -> Tensor:
        """What a layer gives.

        Args:
            values: the arguments of the node.
        """
        if layer.kind == "embedding":
            weight = self._weight(node, layer, values[0])
            values = (weight.to(values[0].dtype), *values[1:])
            return self._call(node, values)
        weight = self._weight(node, layer, values[1])
        if layer.kind == "conv":
            return self._call(node, (values[0], weight.to(values[1].dtype), *values[2:]))
        largest = None
        if layer.choice == "w8a8-static":
            largest = torch.tensor(self._largest[first_input(node)])
        grid = grid_of(self._plan.format, self._plan.arch, 8)
        bias = values[2] if len(values) > 2 else None
        return fake_linear(values[0], weight, bias, layer, grid, largest)

    def _call(self, node: Node, values: Sequence[Any]) -> Tensor:
        assert callable(node.target)
        found: Tensor = node.target(*values, **node.kwargs)
        return found

    def _weight(self, node: Node, layer: LayerPlan, weight: Tensor) -> Tensor:
        """The same for all cases of a run, which come one after the other."""
        known, found = self._last
        if known != (node, layer) or found is None:
            grid = grid_of(self._plan.format, self._plan.arch, layer.bits)
            found = fake_weight(weight, layer, grid)
            self._last = ((node, layer), found)
        return found


class Simulation(Run):
    """One run with the layers of a plan rounded."""

    def __init__(
        self, program: ExportedProgram, plan: QuantizationPlan, context: PassContext
    ) -> None:
        super().__init__(program, context.calibration)
        self._layers = planned_layers(program, plan)
        self._rounding = Rounding(plan, static_ranges(program, context, self._layers))

    def evaluate(self, node: Node, case: int) -> Any:
        layer = self._layers.get(node)
        if layer is None:
            return super().evaluate(node, case)
        values, _ = self.fetch_args_kwargs_from_env(node)
        return self._rounding.output(node, layer, values)


def static_ranges(
    program: ExportedProgram, context: PassContext, layers: Mapping[Node, LayerPlan]
) -> dict[Node, float]:
    """The largest magnitude of what each layer with a static scale reads, all else exact."""
    read = {first_input(n) for n, layer in layers.items() if layer.choice == "w8a8-static"}
    return activation_ranges(program, context, read)
