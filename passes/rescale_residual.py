"""Scale a residual stream down by a power of two, exactly, so that it fits into fp16.

    RMSNorm(s * h, s^2 * eps) = RMSNorm(h, eps)

    before (T5, its stream reaches 1.4e5):       after, k = 3:
        %h0 = embedding(%e, %ids)                    %h0 = embedding(%e * 2^-3, %ids)
        %n = %h0 * rsqrt(mean(%h0^2) + 1e-06)        %n = %h0 * rsqrt(mean(%h0^2) + 1e-06 * 2^-6)
        %g = gelu(linear(%n, %wi_0))                 %g = gelu(linear(%n, %wi_0))
        %p = %g * linear(%n, %wi_1)                  %p = %g * linear(%n, %wi_1 * 2^-1)
        %h1 = %h0 + linear(%p, %wo)                  %h1 = %h0 + linear(%p, %wo * 2^(1-3))

Everything that writes the stream is scaled by 2^-k: weights where a weight does it, else the value.
Where the product of a gated feed-forward leaves the range, its linear branch is scaled by 2^-j and
its projection back by 2^j; without a gate, the linear before a ReLU.  Powers of two change no
rounding, so in fp32 every value keeps its bits, up to the power of two.

k and j are the smallest that leave `headroom` bits between the largest value over the calibration
inputs and fp16's largest.  A norm that nothing is added up for (one on a branch, as in Gemma 2 and
3) reads a stream of its own.  Weights are scaled by an expression: nothing is computed here.

Must not happen: a stream read by anything but root-mean-square norms and outputs (LayerNorm, a
linear: a norm that stands *on* the stream, as in BERT), a stream written in place, one of another
dtype than fp32 (what fp16 already rounded would not keep its bits), an output whose own values fp16
does not hold.  An overflow that no power of two reaches, such as inside the GELU of the gate, is
left, and named.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from enginecast.errors import PassError, SpecError
from enginecast.passes.analyses.residual_stream import (
    Branch,
    Stream,
    factors_of,
    find_branch,
    find_streams,
    foldable,
)
from enginecast.passes.analyses.value_bounds import largest_for_any_input, largest_values
from enginecast.passes.ir.base import Pass, PassContext, Promise, Site
from enginecast.passes.ir.edit import (
    SCALE,
    aten,
    dtype_of,
    insert,
    is_float,
    weight_expressions,
)
from enginecast.passes.ir.match import NoMatch, is_call
from enginecast.passes.ir.scaled_values import mark_scaled
from enginecast.passes.ir.sites import SiteLog
from enginecast.passes.ir.text import dtype_text
from enginecast.passes.ir.traits import Trait, has

LARGEST = torch.finfo(torch.float16).max
PROJECTIONS = frozenset(
    {aten.linear.default, aten.matmul.default, aten.mm.default, aten.addmm.default}
)
WAY_OUT = "--precision bf16 has the range, --skip-modules-pattern keeps a module in fp32"


@dataclass(frozen=True)
class RescaleResidual(Pass):
    """Scale residual streams by a power of two, so that fp16 holds them."""

    name: ClassVar[str] = "rescale-residual"
    promise: ClassVar[Promise] = "exact"

    headroom: int = 1
    """Bits between the largest calibrated value and fp16's largest, at least."""
    k: int | None = None
    """Scale every residual stream by 2^-k, whatever its values are."""
    j: int | None = None
    """Scale every feed-forward's linear branch by 2^-j, whatever its values are."""
    reach: float = 0.0
    """What the stream is known to reach: calibration inputs that stay below are refused."""

    def __post_init__(self) -> None:
        for name in ("headroom", "k", "j"):
            given = getattr(self, name)
            if given is not None and not 0 <= given < 64:
                raise SpecError(f"{name}: expected 0 to 63, got {given}")
        if self.reach < 0:
            raise SpecError(f"reach: expected a magnitude, got {self.reach:g}")

    def run(self, program: ExportedProgram, context: PassContext) -> list[Site]:
        return _Rescaling(self, program, context).run()

    def power(self, largest: float) -> int:
        """The smallest power by which a value of this size leaves the headroom."""
        power = 0
        while largest * 2.0**-power > LARGEST * 2.0**-self.headroom:
            power += 1
        return power


class _Rescaling:
    """One run over one program."""

    def __init__(
        self, options: RescaleResidual, program: ExportedProgram, context: PassContext
    ) -> None:
        self._options = options
        self._program = program
        self._cases = context.calibration
        self._log = SiteLog(context)
        self._weights = weight_expressions(program)
        self._scaled: set[Node] = set()
        self._sizes: dict[Node, float] = {}
        """The largest magnitude of everything that may have to be scaled."""
        self._exponents: Counter[tuple[Node, Node]] = Counter()
        """(reader, source) -> the power of two by which what is read there is scaled"""

    def run(self) -> list[Site]:
        streams = [pair for pair in find_streams(self._program, self._weights) if self._fits(*pair)]
        if not streams:
            return self._log.sites
        members = [node for _, stream in streams for node in stream.members]
        branches: dict[Node, Branch] = {}  # that feed projections among the members
        for node in members:
            if is_call(node, *PROJECTIONS) and foldable(node, self._weights):
                with suppress(NoMatch):
                    branches[node] = find_branch(node, self._weights)
        self._measure([stream for _, stream in streams], branches.values())
        for site, stream in streams:
            self._rescale(site, stream)
        for projection, branch in branches.items():
            self._rescale_branch(projection, branch)
        for (reader, source), exponent in self._exponents.items():
            if exponent:
                factor = self._times(source, exponent, before=reader, like=reader)
                factor.meta.pop(SCALE, None)  # of the reader
                reader.replace_input_with(source, factor)
        # What is beyond fp16 and no power of two reaches.
        for node, size in self._sizes.items():
            if size > LARGEST and node not in self._scaled and node not in self._weights:
                self._log.refused(
                    node,
                    f"its values leave fp16's range (max {size:.3g} > {LARGEST:.0f}), and no power"
                    f" of two passes through what reads it: {WAY_OUT}",
                )
        return self._log.sites

    def _fits(self, site: Node, stream: Stream) -> bool:
        """Whether a stream can be scaled; says why not where it is worth a word."""
        if not stream.is_residual and (stream.blockers or not stream.norms):
            return False  # the input of a norm, not a stream
        if stream.is_residual and self._log.skipped(site):
            return False
        if stream.blockers:
            self._log.refused(site, stream.blockers[0][1])
            return False
        nodes = set(self._program.graph.nodes) - self._weights
        dtypes = {dtype_of(node) for node in filter(is_float, nodes)}
        if dtypes & {torch.float16, torch.bfloat16}:
            names = " and ".join(sorted(map(dtype_text, dtypes)))
            self._log.refused(
                site, f"the program computes in {names}: scaling is exact in f32 only"
            )
            return False
        return bool(stream.norms)

    def _measure(self, streams: Sequence[Stream], branches: Iterable[Branch]) -> None:
        if not self._cases:
            if self._options.k is not None and self._options.j is not None:
                return
            raise PassError(
                "rescale-residual has no calibration inputs to choose its powers of two by",
                hint="Give both powers: rescale-residual{k=3 j=0}.",
            )
        inside = {node for stream in streams for node in stream.members}
        watched = inside | {source for stream in streams for _, source in stream.entries}
        watched |= {node for branch in branches for node in branch.members}
        watched |= {node for node in self._program.graph.nodes if has(node, Trait.HEAVY)}
        self._sizes = largest_values(self._program, self._cases, watched)
        reached = self._largest(inside)
        if reached < self._options.reach:
            raise PassError(
                f"the calibration inputs reach {reached:.3g} in the residual stream, and it is"
                f" known to reach {self._options.reach:.3g}",
                hint="Give inputs as the model gets them: --prompts FILE or --inputs FILE.",
            )

    def _largest(self, nodes: Iterable[Node]) -> float:
        return max((self._sizes.get(node, 0.0) for node in nodes), default=0.0)

    def _rescale(self, site: Node, stream: Stream) -> None:
        largest = self._largest(stream.members)
        power = self._options.power(largest)
        if stream.is_residual and self._options.k is not None:
            power = self._options.k
        if not power:
            if stream.is_residual:
                self._log.refused(site, f"its values are within fp16's range (max {largest:.3g})")
            return
        if self._largest(stream.outputs) > LARGEST:
            self._log.refused(
                site,
                f"the stream itself is an output, and fp16 does not hold it (max {largest:.3g})",
            )
            return
        if not stream.is_residual and self._log.skipped(site):
            return
        bound, most = "", None
        if stream.is_residual:  # what no input exceeds, and the power that would hold even that
            most = largest_for_any_input(self._program, self._weights, stream.members)
        if most is not None:
            holds = max(0, math.ceil(math.log2(most / LARGEST))) if most else 0
            bound = f"; no input exceeds {most:.3g}, which k={holds} holds"
        self._scale(stream, -power)
        for norm in stream.norms:
            node, epsilon = norm.node, norm.epsilon * 4.0**-power
            if is_call(node, aten.rms_norm.default):
                source, sizes, weight, _ = (*node.args, None, None)[:4]
                node.args = (source, sizes, weight, epsilon)
            else:
                left, right = node.args[:2]
                node.args = (left, epsilon) if isinstance(left, Node) else (epsilon, right)
            for inner, times in norm.inner.items():
                mark_scaled(inner, -power * times)
        output = self._program.graph.output_node()
        for node in stream.outputs:  # are returned as they were
            whole = self._times(node, power, before=output, like=node)
            mark_scaled(whole, power)
            output.replace_input_with(node, whole)
        writers = len({node for node, _ in stream.entries})
        self._log.done(
            site,
            f"scaled by 2^-{power} ({writers} writers, {len(stream.norms)} norms):"
            f" max {largest:.3g}, now {largest * 2.0**-power:.3g}{bound}",
        )

    def _rescale_branch(self, projection: Node, branch: Branch) -> None:
        largest = self._largest(branch.members)
        power = self._options.power(largest) if self._options.j is None else self._options.j
        if not power or self._log.skipped(projection):
            return
        self._scale(branch, -power)
        self._exponents[projection, factors_of(projection)[1]] += power
        self._log.done(
            projection,
            f"reads a product scaled by 2^-{power}:"
            f" max {largest:.3g}, now {largest * 2.0**-power:.3g}",
        )

    def _scale(self, scaled: Stream | Branch, exponent: int) -> None:
        """Scale what comes in; say of every member that it is scaled."""
        for entry in scaled.entries:
            self._exponents[entry] += exponent
        for node in scaled.members:
            mark_scaled(node, exponent)
        self._scaled.update(scaled.members)

    def _times(self, source: Node, power: int, *, before: Node, like: Node) -> Node:
        graph = self._program.graph
        with graph.inserting_before(before):
            return insert(graph, aten.mul.Tensor, (source, 2.0**power), like=like)
