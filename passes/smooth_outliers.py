"""Move outlier channels from the inputs of linears into their weights, exactly.

    before:  %n = rms_norm(%h, %w)                after:  %n = rms_norm(%h, %w * 2^-e)
             %q = linear(%n, %wq)                         %q = linear(%n, %wq * 2^e)
             %k = linear(%n, %wk)                         %k = linear(%n, %wk * 2^e)

A few channels of what a norm gives are many times as large as the rest, and a scale for a whole row
leaves the others few of the steps of int8.  Each channel gets an exponent of its own: what linears
read is multiplied by 2^-e and their weights by 2^e, with

    2^e = max|x|^alpha / max|w|^(1 - alpha)

rounded to a power of two (SmoothQuant, Xiao et al. 2022, arXiv 2211.10438, equation 4), over the
median of all channels: row-wise scales take up what is common to all.  A power of two moves no
rounding in fp32, so every output keeps its bits.

What can be scaled (see `channels`): the weights of norms, the rows of the linear that makes
the values of an attention (for the output projection), of the linear branch of a gate and of the
linear before a ReLU (for the projection after them).  Weights become expressions: nothing is
computed here.

Alpha is chosen for each group of linears by the error of their products on calibration rows that
the exponents do not come from; a group that gains less than 5 % is left alone.

Must not happen: a value that anything but linears reads (BERT's norms stand on the stream), GELU
before the projection, weights that are shared, values in fp16 (powers of two are not exact near its
end: scale before `unify-dtype`) or not finite.
"""

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import Node
from torch.nn import functional

from enginecast.errors import PassError, SpecError
from enginecast.ops.quantize import dequantize, dynamic_scale, quantize
from enginecast.passes.analyses.channels import (
    Readers,
    Source,
    find_readers,
    find_roots,
    find_source,
)
from enginecast.passes.ir.base import Pass, PassContext, Promise, Site
from enginecast.passes.ir.edit import (
    SCALE,
    add_weight,
    arguments,
    aten,
    dtype_of,
    free_name,
    insert,
    shape_of,
    weight_expressions,
    weight_value,
)
from enginecast.passes.ir.interpret import interpret_cases
from enginecast.passes.ir.match import NoMatch, real_users
from enginecast.passes.ir.scaled_values import factors, mark_scaled
from enginecast.passes.ir.sites import SiteLog
from enginecast.passes.ir.source import module_path
from enginecast.passes.quantize.measure.calibration import GIVE, valid_rows

ROWS = 128
"""Rows that are kept of each value, over all cases."""
OUTPUTS = 512
"""Rows of each weight that errors are compared on: they are means over rows."""
ALPHAS = (0.25, 0.4, 0.5, 0.6, 0.75, 0.9)
FURTHEST = 12
"""Largest exponent."""
FINEST, COARSEST = 2.0**-8, 2.0**14
"""What the largest value and the largest weight of a channel may become, so that fp16 holds the
channel with bits to spare; one that is beyond already may stay where it is."""
GAIN = 0.95
"""Scaling has to bring the error down at least so far: what is gained by less on some rows was seen
to be lost on others."""
FORMATS = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}


@dataclass(frozen=True)
class SmoothOutliers(Pass):
    """Move outlier channels from what linears read into their weights, by powers of two."""

    name: ClassVar[str] = "smooth-outliers"
    promise: ClassVar[Promise] = "exact"

    alpha: float | None = None
    """How much of the range goes into the weights, above 0 to 1, whatever is gained; left out: what
    is found best for each group of linears."""
    format: Literal["int8", "fp8"] = "int8"
    """Of the products whose error is compared, with a scale for each row."""

    def __post_init__(self) -> None:
        if self.alpha is not None and not 0 < self.alpha <= 1:
            raise SpecError(f"alpha: expected above 0 to 1, got {self.alpha:g}")

    def run(self, program: ExportedProgram, context: PassContext) -> list[Site]:
        return _Smoothing(self, program, context).run()


@dataclass(frozen=True)
class _Group:
    """Linears that read one value."""

    root: Node
    source: Source
    readers: Readers


@dataclass
class Sample:
    """Of one value [..., channels], over the rows that count."""

    fitting: Tensor
    """[channels]: the largest magnitude in every other row."""
    largest: Tensor
    """[channels]: in all rows."""
    held_out: list[Tensor] = field(default_factory=list)
    """[n, channels] each: some of the rows that `fitting` does not know."""


class _Smoothing:
    """One run over one program."""

    def __init__(
        self, options: SmoothOutliers, program: ExportedProgram, context: PassContext
    ) -> None:
        self._options = options
        self._program = program
        self._context = context
        self._log = SiteLog(context)
        self._weights = weight_expressions(program)

    def run(self) -> list[Site]:
        roots = find_roots(self._program, self._weights)
        groups = [group for root in roots if (group := self._group(root)) is not None]
        if not groups:
            return self._log.sites
        if not self._context.calibration:
            raise PassError(
                "smooth-outliers has no calibration inputs to see outliers in",
                hint=GIVE,
            )
        watched = {group.root for group in groups}
        cases, mask = self._context.calibration, self._context.mask_input
        samples = sample_channels(self._program, cases, watched, mask)
        # All are chosen before the first is scaled: values and weights are those of the samples.
        chosen = [(group, self._exponents(group, samples.get(group.root))) for group in groups]
        for group, found in chosen:
            if found is not None:
                self._scale(group, found)
        return self._log.sites

    def _group(self, root: Node) -> _Group | None:
        if self._log.skipped(root):
            return None
        try:
            if not isinstance(shape_of(root)[-1], int):
                raise NoMatch(root, "the number of its channels varies")
            source = find_source(root, self._weights)
            readers = find_readers(root, self._weights)
            for node in (*readers.linears, source.fold.node):
                for weight in set(node.all_input_nodes) & self._weights:
                    _check_shared(weight)
        except NoMatch as miss:
            self._log.refused(root, miss.reason)
            return None
        return _Group(root, source, readers)

    def _exponents(self, group: _Group, sample: Sample | None) -> Tensor | None:
        """The exponents of the alpha with the least error on rows that they do not come from; None,
        and why, where a group is left alone.
        """
        if sample is None:
            self._log.refused(group.root, "no calibration input has a row there")
            return None
        if not sample.largest.isfinite().all():
            self._log.refused(group.root, "its values are not finite")
            return None
        alphas = ALPHAS if self._options.alpha is None else (self._options.alpha,)
        dtype = FORMATS[self._options.format]
        tied, rows = group.source.layout.tied, torch.cat(sample.held_out)
        weights: list[Tensor] = [
            weight_value(self._program, arguments(linear)[1]).float()
            for linear in group.readers.linears
        ]
        columns = tied(torch.stack([weight.abs().amax(0) for weight in weights]).amax(0))
        sizes = tied(sample.fitting)
        some = [weight[:: -(-len(weight) // OUTPUTS)] for weight in weights]
        error = {
            alpha: products_error(rows, some, exponents(sizes, columns, alpha), dtype)
            for alpha in alphas
        }
        none = torch.zeros(len(columns), dtype=torch.int64)
        before = products_error(rows, some, none, dtype)
        alpha = min(error, key=error.__getitem__)
        chosen = exponents(tied(sample.largest), columns, alpha)
        errors = f"row-wise {self._options.format} error {before:.2g}"
        is_gain = self._options.alpha is not None or error[alpha] <= GAIN * before
        if not chosen.any() or not is_gain:
            self._log.refused(
                group.root, f"its channels are even: {errors}, {error[alpha]:.2g} at best"
            )
            return None
        names = ", ".join(linear.name for linear in group.readers.linears)
        self._log.done(
            group.root,
            f"channels scaled by 2^{-int(chosen.max())} to 2^{-int(chosen.min())} for {names}"
            f" (alpha {alpha:g}): {errors}, now {error[alpha]:.2g}",
        )
        return chosen

    def _scale(self, group: _Group, exponents: Tensor) -> None:
        """Scale the weights of a group, and say of every value between them that it is scaled."""
        fold, layout = group.source.fold, group.source.layout
        name = f"{module_path(group.root)}.smoothing".removeprefix(".")
        for linear in group.readers.linears:
            # A constant for each: merge-linears takes no weights that share a part.
            powers = self._powers(name, exponents, dtype_of(linear.args[1]))
            self._multiply(linear, 1, powers)
        rows = -fold.spread(layout.spread(exponents))
        for position, is_matrix in fold.places:
            own_rows = rows.unsqueeze(1) if is_matrix else rows
            powers = self._powers(name, own_rows, dtype_of(fold.node.args[position]))
            self._multiply(fold.node, position, powers)
        for node, own in group.source.members:
            mark_scaled(node, -own.spread(exponents))
        for node in group.readers.members:
            mark_scaled(node, -exponents)
        if fold.total != len(exponents) and fold.node not in dict(group.source.members):
            mark_scaled(fold.node, rows)  # a merged linear

    def _powers(self, name: str, exponents: Tensor, dtype: torch.dtype | None) -> Node:
        """A constant of powers of two."""
        assert dtype is not None
        tensor = factors(exponents, dtype)
        free = free_name(self._program, name)
        return add_weight(self._program, free, tensor, InputKind.CONSTANT_TENSOR)

    def _multiply(self, reader: Node, position: int, powers: Node) -> None:
        """Put a weight times powers of two in the place of the weight."""
        weight, graph = reader.args[position], self._program.graph
        with graph.inserting_before(reader):
            scaled = insert(graph, aten.mul.Tensor, (weight, powers), like=reader)
        scaled.meta.pop(SCALE, None)  # of the reader
        reader.update_arg(position, scaled)


def _check_shared(weight: Node) -> None:
    """Refuse a matrix that something else reads as well: a second copy of it would be stored."""
    if len(shape_of(weight)) < 2:
        return
    if len(real_users(weight)) > 1:
        raise NoMatch(weight, f"{weight.name} is read elsewhere as well")
    for source in weight.all_input_nodes:
        _check_shared(source)


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
    samples: dict[Node, Sample] = {}
    most = -(-ROWS // len(cases))

    def keep(case: int, node: Node, tensor: Tensor) -> None:
        if node not in watched:
            return
        mask = cases[case].get(mask_input or "")
        rows = valid_rows(tensor, None if mask is None else mask != 0)
        # Of a single row, both halves are that row.
        known, other = rows[::2], rows[1::2] if len(rows) > 1 else rows
        if not len(rows):
            return
        none = torch.zeros(tensor.shape[-1])
        sample = samples.setdefault(node, Sample(none, none))
        sample.fitting = torch.maximum(sample.fitting, known.abs().amax(0).float())
        sample.largest = torch.maximum(sample.largest, rows.abs().amax(0).float())
        chosen = torch.linspace(0, len(other) - 1, min(most, len(other))).long()
        sample.held_out.append(other[chosen].float())

    interpret_cases(program, cases, watch=keep)
    return samples


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
    """Relative L2 error of a row of a quantized product, root mean square over rows and weights.

    Each row counts alike: one large token would hide what happens to all others.

    Args:
        rows: [n, channels].
        weights: [N, channels] each.
        exponents: [channels], of the weights.
        dtype: quantized dtype; one scale for each row of both.
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
    mean = float(torch.stack(squares).nanmean().sqrt())
    return 0.0 if math.isnan(mean) else mean


def _rounded(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    scale = dynamic_scale(tensor, dtype, True)
    rounded: Tensor = dequantize(quantize(tensor, scale, dtype), scale, torch.float32)
    return rounded
