"""How far values reach over the calibration inputs: what static scales are made of."""

import math
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import Node

from enginecast.errors import PassError
from enginecast.passes.ir.base import PassContext
from enginecast.passes.ir.edit import first_input
from enginecast.passes.ir.interpret import interpret_cases
from enginecast.passes.ir.quantization_plan import LayerPlan
from enginecast.passes.quantize.measure.calibration import masks_of, valid_rows
from enginecast.passes.quantize.measure.quantizable import joined_integers, spans_wanted


@dataclass(frozen=True)
class Span:
    """How far the elements of a value reach."""

    low: float
    high: float
    channels: Tensor | None = None
    """The largest magnitude in each, [N], where each has a scale of its own."""

    @property
    def largest(self) -> float:
        """The largest magnitude; infinite or NaN where a value is."""
        return max(-self.low, self.high)

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.low) and math.isfinite(self.high)


def static_spans(
    program: ExportedProgram,
    context: PassContext,
    layers: Iterable[tuple[Node, LayerPlan]],
    source: Callable[[Node], Node] = first_input,
) -> dict[Node, Span]:
    """The least and largest elements that the static scales of layers are made for, all else
    exact.

    Args:
        source: the value whose elements a linear reads.
    """
    static = {node: layer for node, layer in layers if layer.choice == "w8a8-static"}
    read = {source(node) for node, layer in static.items() if layer.kind == "linear"}
    whole = spans_wanted(program.graph, static)
    whole |= {first_input(node): False for node, layer in static.items() if layer.signed}
    spans = activation_spans(program, context, read, whole)
    return with_joined(spans, static)


def with_joined(spans: Mapping[Node, Span], plans: Mapping[Node, LayerPlan]) -> dict[Node, Span]:
    """Spans, of which what is joined in integers has one in common."""
    joined = dict(spans)
    groups: list[set[Node]] = []
    for node, origins in joined_integers(plans).items():
        group = {node, *origins}
        for other in [known for known in groups if known & group]:
            groups.remove(other)
            group |= other
        groups.append(group)
    for group in groups:
        members = [joined[node] for node in group]
        low, high = (torch.tensor([getattr(m, end) for m in members]) for end in ("low", "high"))
        whole = Span(float(low.amin()), float(high.amax()))  # NaN is handed on
        joined |= dict.fromkeys(group, whole)
    return joined


def activation_spans(
    program: ExportedProgram,
    context: PassContext,
    nodes: Set[Node],
    whole: Mapping[Node, bool] = MappingProxyType({}),
) -> dict[Node, Span]:
    """Run the program over the calibration inputs.

    What stands in the rows that a mask leaves out is not a measure: a model may compute anything
    there.

    Args:
        context: with `calibration`; `mask_input` names the mask among it, [B, S].
        nodes: values [B, S, ...] have the mask's rows; others count whole.
        whole: values that have channels where a mask has tokens; they count whole.  Of those with
            True the magnitude in each channel is looked for, too.

    Returns:
        For each node its least and largest element, over all cases; infinite or NaN where a value
        is.

    Raises:
        PassError: no calibration inputs were given.
    """
    if not nodes and not whole:
        return {}
    if not context.calibration:
        raise PassError(
            "static scales of activations need calibration inputs, got none",
            hint="Give inputs or prompts, or plan dynamic scales.",
        )
    spans: dict[Node, tuple[Tensor, Tensor]] = {}
    channels: dict[Node, Tensor] = {}
    masks = masks_of(context)
    wanted = nodes | whole.keys()

    def keep(case: int, node: Node, tensor: Tensor) -> None:
        if node not in wanted:
            return
        valid = valid_rows(tensor, None if node in whole else masks[case])
        if valid.numel():
            low, high = (end.float() for end in valid.aminmax())
            known = spans.get(node, (low, high))
            # Both hand NaN on.
            spans[node] = torch.minimum(known[0], low), torch.maximum(known[1], high)
            if whole.get(node):
                sizes = tensor.abs().transpose(0, 1).flatten(1).amax(1).float()
                channels[node] = torch.maximum(channels.get(node, sizes), sizes)

    for case, inputs in enumerate(context.calibration):
        for node in wanted:
            if node.op == "placeholder" and node.name in inputs:
                keep(case, node, inputs[node.name])
    interpret_cases(program, context.calibration, watch=keep)
    nothing = (torch.zeros(()), torch.zeros(()))
    ends = {node: spans.get(node, nothing) for node in wanted}
    return {
        node: Span(float(low), float(high), channels.get(node))
        for node, (low, high) in ends.items()
    }
