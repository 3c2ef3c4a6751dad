"""The largest magnitude of what quantised layers read, over valid rows of calibration inputs."""

from collections.abc import Mapping, Set

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import Node

from enginecast.errors import PassError
from enginecast.passes.base import PassContext
from enginecast.passes.interpret import interpret_cases


def activation_ranges(
    program: ExportedProgram, context: PassContext, nodes: Set[Node]
) -> dict[Node, float]:
    """Run the program over the calibration inputs.

    What stands in the rows that a mask leaves out is no measure: a model may compute anything
    there.

    Args:
        context: with `calibration`; `mask_input` names the mask among it, [B, S].
        nodes: values [B, S, ...] have the mask's rows; others count whole.

    Returns:
        For each node max |x|, over all cases; infinite or NaN where a value is.

    Raises:
        PassError: there are no calibration inputs.
    """
    if not nodes:
        return {}
    if not context.calibration:
        raise PassError(
            "static scales of activations need calibration inputs, got none",
            hint="Give inputs or prompts, or plan dynamic scales.",
        )
    found: dict[Node, Tensor] = {}

    def keep(case: int, node: Node, tensor: Tensor) -> None:
        if node not in nodes:
            return
        valid = _valid_rows(tensor, _mask(context, context.calibration[case]))
        if valid.numel():
            largest = valid.abs().amax().float()
            found[node] = torch.maximum(found.get(node, largest), largest)  # hands NaN on

    for case, inputs in enumerate(context.calibration):
        for node in nodes:
            if node.op == "placeholder" and node.name in inputs:
                keep(case, node, inputs[node.name])
    interpret_cases(program, context.calibration, watch=keep)
    return {node: float(found.get(node, torch.zeros(()))) for node in nodes}


def _mask(context: PassContext, inputs: Mapping[str, Tensor]) -> Tensor | None:
    return inputs.get(context.mask_input) if context.mask_input else None


def _valid_rows(tensor: Tensor, mask: Tensor | None) -> Tensor:
    if mask is None or tensor.shape[: mask.dim()] != mask.shape:
        return tensor
    return tensor[mask != 0]
