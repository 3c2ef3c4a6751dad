"""Find the op in which kernels lose most of the digits of an output."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind
from torch.fx import Node

from enginecast.passes.ir.source import module_path, source_line
from enginecast.verification.eager.kernel_noise import Noisy, Ordered, Samples
from enginecast.verification.eager.sequence import LANES


def place_of_loss(program: ExportedProgram, inputs: Mapping[str, Tensor], position: int) -> str:
    """Where most of the error of an output arises in a case, as "mean at net.py:12 (head)".

    Kernel noise, or another order of sums, moves each value by some share of its length. From the
    output, the search follows the input that is moved by most, and names the op whose result is
    moved by so much more than its inputs.

    Args:
        position: which of the program's outputs.
    """
    moved: dict[Node, float] = {}
    for kind in (
        _NoisyMoves(program, [inputs], 2, 0),
        _OrderedMoves(program, [inputs], len(LANES)),
    ):
        with torch.no_grad():
            kind.results()
        for node, by in kind.moved.items():
            moved[node] = max(by, moved.get(node, 0.0))
    specs = program.graph_signature.output_specs
    names = [spec.arg.name for spec in specs if spec.kind is OutputKind.USER_OUTPUT]
    at: Node | None = next((n for n in program.graph.nodes if n.name == names[position]), None)
    worst, gain = None, 0.0
    while at is not None and at in moved:
        read = at.all_input_nodes
        before = max(read, key=lambda each: moved.get(each, 0.0)) if read else None
        rise = moved[at] - (moved.get(before, 0.0) if before is not None else 0.0)
        if rise > gain:
            worst, gain = at, rise
        at = before
    return "" if worst is None else _described(worst)


def _described(node: Node) -> str:
    name = getattr(node.target, "_schema", None)
    op = str(node.target) if name is None else name.name.split("::")[-1]
    line, module = source_line(node), module_path(node)
    return op + (f" at {line}" if line else "") + (f" ({module})" if module else "")


class _Moves(Samples):
    """Keeps by which share of its length a sample moves each value."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.moved: dict[Node, float] = {}

    def evaluate(self, node: Node, case: int) -> Any:
        found = super().evaluate(node, case)
        plain = self.plain(node, case)
        if plain is None or not isinstance(found, Tensor) or not found.is_floating_point():
            return found
        if found.shape == plain.shape:
            by = float((found - plain).double().norm() / plain.double().norm().clamp(1e-30))
            self.moved[node] = max(by, self.moved.get(node, 0.0))
        return found


class _NoisyMoves(_Moves, Noisy):
    """By noise."""


class _OrderedMoves(_Moves, Ordered):
    """By the order of sums."""
