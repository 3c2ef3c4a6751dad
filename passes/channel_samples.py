"""What calibration inputs show of the channels of chosen values: how large each gets, and some rows
to try a quantisation on."""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import Node

from enginecast.passes.interpret import interpret_cases

ROWS = 128
"""Rows that are kept of each value, over all cases."""


@dataclass
class Sample:
    """Of one value [..., channels], over the rows that count."""

    fitting: Tensor
    """[channels]: the largest magnitude in every other row."""
    largest: Tensor
    """[channels]: in all rows."""
    rows: list[Tensor] = field(default_factory=list)
    """[n, channels] each: some of the rows that `fitting` does not know."""

    @property
    def held_out(self) -> Tensor:
        """All of those rows."""
        return torch.cat(self.rows)


def sample_channels(
    program: ExportedProgram,
    cases: Sequence[Mapping[str, Tensor]],
    watched: Set[Node],
    mask_input: str | None = None,
) -> dict[Node, Sample]:
    """Run the program over all cases and look at each watched value.

    Args:
        cases: inputs by name; at least one.
        watched: nodes that give [..., channels].
        mask_input: the input that marks valid rows, [batch, tokens]; others are left out.
    """
    found: dict[Node, Sample] = {}
    most = -(-ROWS // len(cases))

    def keep(case: int, node: Node, tensor: Tensor) -> None:
        if node not in watched:
            return
        rows = _valid(tensor, cases[case].get(mask_input or ""))
        # Of a single row, both halves are that row.
        known, other = rows[::2], rows[1::2] if len(rows) > 1 else rows
        if not len(rows):
            return
        sample = found.setdefault(node, _empty(tensor))
        sample.fitting = torch.maximum(sample.fitting, known.abs().amax(0).float())
        sample.largest = torch.maximum(sample.largest, rows.abs().amax(0).float())
        chosen = torch.linspace(0, len(other) - 1, min(most, len(other))).long()
        sample.rows.append(other[chosen].float())

    interpret_cases(program, cases, watch=keep)
    return found


def _empty(tensor: Tensor) -> Sample:
    channels = tensor.shape[-1]
    return Sample(torch.zeros(channels), torch.zeros(channels))


def _valid(tensor: Tensor, mask: Tensor | None) -> Tensor:
    """The rows that count, [n, channels]."""
    if mask is not None and tensor.shape[: mask.dim()] == mask.shape:
        return tensor[mask != 0].reshape(-1, tensor.shape[-1])
    return tensor.reshape(-1, tensor.shape[-1])
