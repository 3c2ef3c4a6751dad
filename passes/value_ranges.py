"""The largest magnitude of chosen values over calibration inputs."""

import math
from collections.abc import Mapping, Sequence, Set

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import Node

from enginecast.errors import PassError
from enginecast.passes.interpret import interpret_cases
from enginecast.passes.source import module_path, source_line


def largest_values(
    program: ExportedProgram, cases: Sequence[Mapping[str, Tensor]], watched: Set[Node]
) -> dict[Node, float]:
    """Run the program over all cases and keep the largest magnitude of each watched value.

    Rows that a mask leaves out count as well: an infinity there is a NaN once attention multiplies
    it by zero.

    Args:
        program: computes in fp32, so that nothing is cut off.
        cases: inputs by name.
        watched: nodes; those that give no tensor are left out of the result.

    Raises:
        PassError: a watched value is not finite.
    """
    found: dict[Node, float] = {}

    def keep(_: int, node: Node, tensor: Tensor) -> None:
        if node not in watched or not tensor.numel():
            return
        low, high = (float(bound) for bound in torch.aminmax(tensor))
        size = max(-low, high)
        if not math.isfinite(size):
            place = f"{module_path(node) or 'the model itself'} {source_line(node)}".strip()
            raise PassError(
                f"values at {place} are not finite in fp32 already",
                hint="Look for inputs that the model cannot take: no precision holds these.",
            )
        found[node] = max(found.get(node, 0.0), size)

    interpret_cases(program, cases, watch=keep)
    return found
