"""How far each channel is scaled, and what that does to a product of quantised values.

A channel's factor is 2^-e of what a linear reads, and 2^e of its weight, with

    2^e = max|x|^alpha / max|w|^(1 - alpha)

rounded to a power of two (SmoothQuant, Xiao et al. 2022, arXiv 2211.10438, equation 4), over the
median of all channels: row-wise scales take up what is common to all.
"""

import math
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import Node
from torch.nn import functional

from enginecast.ops.quantize import dequantize, dynamic_scale, quantize
from enginecast.passes.ir.interpret import interpret_cases
from enginecast.passes.ir.scaled_values import factors

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


ALPHAS = (0.25, 0.4, 0.5, 0.6, 0.75, 0.9)
FURTHEST = 12
"""Largest exponent."""
FINEST, COARSEST = 2.0**-8, 2.0**14
"""What the largest value and the largest weight of a channel may become, so that fp16 holds the
channel with bits to spare; one that is beyond already may stay where it is."""
GAIN = 0.95
"""Scaling has to bring the error down at least so far: what is gained by less on some rows was seen
to be lost on others."""


@dataclass(frozen=True)
class Choice:
    """What was found for the linears that read one value."""

    exponents: Tensor
    """int64, [channels]: of the weights; what they read gets the opposite."""
    alpha: float
    before: float
    """Error of the quantised products as they are, on rows that the exponents were not made
    from."""
    after: float
    """The same with exponents of this alpha."""

    @property
    def helps(self) -> bool:
        return self.after <= GAIN * self.before


def choose(
    sample: Sample,
    weights: Sequence[Tensor],
    tied: Callable[[Tensor], Tensor],
    dtype: torch.dtype,
    alphas: Sequence[float] = ALPHAS,
) -> Choice:
    """The alpha with the least error on rows that are held out, and its exponents from all rows.

    Args:
        sample: of what the linears read.
        weights: of the linears, [N, channels] each; fp32.
        tied: makes sizes of channels alike that must share a factor.
        dtype: quantised dtype of values and weights, both with a scale for each row.
        alphas: to try.
    """
    columns = tied(torch.stack([weight.abs().amax(0) for weight in weights]).amax(0))
    rows = sample.held_out
    before = products_error(rows, weights, torch.zeros(len(columns), dtype=torch.int64), dtype)
    trials = {
        alpha: products_error(rows, weights, exponents(tied(sample.fitting), columns, alpha), dtype)
        for alpha in alphas
    }
    alpha = min(trials, key=trials.__getitem__)
    found = exponents(tied(sample.largest), columns, alpha)
    return Choice(found, alpha, before, trials[alpha])


def exponents(sizes: Tensor, columns: Tensor, alpha: float) -> Tensor:
    """The exponent of each channel, int64.

    Args:
        sizes: [channels], largest magnitude of the values; a channel without any is left alone.
        columns: [channels], largest magnitude of the weights.
        alpha: how much of the range of the values goes into the weights, 0 to 1.
    """
    live = (sizes > 0) & (columns > 0)
    if not live.any():
        return torch.zeros(len(sizes), dtype=torch.int64)
    values, weights = sizes.double().log2(), columns.double().log2()
    wanted = alpha * values - (1 - alpha) * weights
    wanted = (wanted - wanted[live].median()).round()
    low, high = math.log2(FINEST), math.log2(COARSEST)
    most = torch.minimum(high - weights, values - low).floor().clamp(0, FURTHEST)
    least = torch.maximum(low - weights, values - high).ceil().clamp(-FURTHEST, 0)
    bounded = torch.maximum(torch.minimum(wanted, most), least)
    return torch.where(live, bounded, 0.0).long()


def products_error(
    rows: Tensor, weights: Sequence[Tensor], exponents: Tensor, dtype: torch.dtype
) -> float:
    """Relative L2 error of a row of a quantised product, root mean square over rows and weights.

    Each row counts alike: one large token would hide what happens to all others.

    Args:
        rows: [n, channels].
        weights: [N, channels] each.
        exponents: [channels], of the weights.
        dtype: quantised dtype; one scale for each row of both.
    """
    down, up = factors(-exponents), factors(exponents)
    values = _rounded(rows * down, dtype)
    squares = []
    for weight in weights:
        exact = functional.linear(rows, weight)
        error = functional.linear(values, _rounded(weight * up, dtype)) - exact
        size = exact.norm(dim=-1)
        kept = size > 0
        squares.append((error.norm(dim=-1)[kept] / size[kept]).square().mean())
    found = float(torch.stack(squares).nanmean().sqrt())
    return 0.0 if math.isnan(found) else found


def _rounded(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    scale = dynamic_scale(tensor, dtype, True)
    rounded: Tensor = dequantize(quantize(tensor, scale, dtype), scale, torch.float32)
    return rounded
