"""Move outlier channels from what linears read into their weights, exactly.

    before:  %n = rms_norm(%h, %w)                after:  %n = rms_norm(%h, %w * 2^-e)
             %q = linear(%n, %wq)                         %q = linear(%n, %wq * 2^e)
             %k = linear(%n, %wk)                         %k = linear(%n, %wk * 2^e)

A few channels of what a norm gives are many times as large as the rest, and a scale for a whole row
leaves the others few of the steps of int8.  Each channel gets an exponent of its own (see
`smoothing`); a power of two moves no rounding in fp32, so every output keeps its bits.

What can be scaled (see `channels`): the weights of norms, the rows of the linear that makes
the values of an attention (for the output projection), of the linear branch of a gate and of the
linear before a ReLU (for the projection after them).  Weights become expressions: nothing is
computed here.

Alpha is chosen for each group of linears by the error of their products on calibration rows that
the exponents do not come from; a group that gains less than 5 % is left alone.

Must not happen: a value that anything but linears reads (BERT's norms stand on the stream), GELU
before the projection, weights that are shared, values in fp16 (powers of two are not exact near its
end: scale before `unify-dtype`), written in place, or not finite.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import Node

from enginecast.errors import PassError, SpecError
from enginecast.passes.analyses.channels import (
    Readers,
    Source,
    find_readers,
    find_roots,
    find_source,
)
from enginecast.passes.analyses.smoothing import ALPHAS, Choice, Sample, choose, sample_channels
from enginecast.passes.ir.base import Pass, PassContext, Promise, Site
from enginecast.passes.ir.edit import (
    SCALE,
    add_weight,
    aten,
    dtype_of,
    free_name,
    insert,
    shape_of,
    weight_expressions,
    weight_value,
)
from enginecast.passes.ir.effects import mutated_values
from enginecast.passes.ir.match import NoMatch, real_users
from enginecast.passes.ir.scaled_values import factors, mark_scaled
from enginecast.passes.ir.sites import SiteLog
from enginecast.passes.ir.source import module_path

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
        self._written = mutated_values(program.graph)

    def run(self) -> list[Site]:
        roots = find_roots(self._program, self._weights)
        groups = [group for root in roots if (group := self._group(root)) is not None]
        if not groups:
            return self._log.sites
        if not self._context.calibration:
            raise PassError(
                "smooth-outliers has no calibration inputs to see outliers in",
                hint="Give inputs as the model gets them: --prompts FILE or --inputs FILE.",
            )
        watched = {group.root for group in groups}
        cases, mask = self._context.calibration, self._context.mask_input
        samples = sample_channels(self._program, cases, watched, mask)
        # All are chosen before the first is scaled: values and weights are those of the samples.
        chosen = [(group, self._choice(group, samples.get(group.root))) for group in groups]
        for group, choice in chosen:
            if choice is not None:
                self._scale(group, choice.exponents)
        return self._log.sites

    def _group(self, root: Node) -> _Group | None:
        if self._log.skipped(root):
            return None
        try:
            if not isinstance(shape_of(root)[-1], int):
                raise NoMatch(root, "the number of its channels varies")
            source = find_source(root, self._weights, self._written)
            readers = find_readers(root, self._weights)
            for node in (*readers.linears, source.fold.node):
                for weight in set(node.all_input_nodes) & self._weights:
                    _check_shared(weight)
        except NoMatch as miss:
            self._log.refused(root, miss.reason)
            return None
        return _Group(root, source, readers)

    def _choice(self, group: _Group, sample: Sample | None) -> Choice | None:
        """What to do with a group; None, and why, where it is left alone."""
        reason = _unusable(sample)
        if sample is None or reason:
            self._log.refused(group.root, reason)
            return None
        alpha = self._options.alpha
        found = choose(
            sample,
            [self._weight(linear) for linear in group.readers.linears],
            group.source.layout.tied,
            FORMATS[self._options.format],
            ALPHAS if alpha is None else (alpha,),
        )
        errors = f"row-wise {self._options.format} error {found.before:.2g}"
        if not found.exponents.any() or (alpha is None and not found.helps):
            self._log.refused(
                group.root, f"its channels are even: {errors}, {found.after:.2g} at best"
            )
            return None
        least, most = int(found.exponents.min()), int(found.exponents.max())
        names = ", ".join(linear.name for linear in group.readers.linears)
        self._log.done(
            group.root,
            f"channels scaled by 2^{-most} to 2^{-least} for {names} (alpha {found.alpha:g}):"
            f" {errors}, now {found.after:.2g}",
        )
        return found

    def _weight(self, linear: Node) -> Tensor:
        weight = linear.args[1]
        assert isinstance(weight, Node)
        found: Tensor = weight_value(self._program, weight)
        return found.float()

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


def _unusable(sample: Sample | None) -> str:
    """Why nothing can be said of a value; empty when it can."""
    if sample is None:
        return "no calibration input has a row there"
    return "" if bool(torch.isfinite(sample.largest).all()) else "its values are not finite"
