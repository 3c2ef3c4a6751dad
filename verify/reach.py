"""How far the values of a program reach, over some inputs."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import Node

from enginecast.passes.interpret import interpret_cases
from enginecast.verify.boundaries import FILL


def reaches(
    program: ExportedProgram, cases: Sequence[Mapping[str, Tensor]]
) -> tuple[dict[Node, float], list[dict[str, Tensor]]]:
    """The largest finite magnitude of each float value that depends on the inputs, and the outputs
    of each case.

    Memory stays near that of one layer.  Fill values of masks (beyond 1e37) do not count.

    Args:
        program: in fp32, whose values do not leave their range.
        cases: inputs by placeholder name.
    """
    found: dict[Node, float] = {}

    def keep(_: int, node: Node, tensor: Tensor) -> None:
        if tensor.is_floating_point() and tensor.numel():
            found[node] = max(found.get(node, 0.0), _largest(tensor))

    return found, interpret_cases(program, cases, watch=keep)


def _largest(tensor: Tensor) -> float:
    low, high = (bound.item() for bound in torch.aminmax(tensor))
    largest = max(-low, high)
    if largest < FILL:  # false for NaN, too
        return float(largest)
    sizes = tensor.abs()
    return float(torch.where(sizes < FILL, sizes, 0.0).max())
