"""Scale a residual stream down by a power of two, exactly, so that fp16 holds it.

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
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from enginecast.errors import PassError, SpecError
from enginecast.passes.analyses.residual_stream import (
    Branch,
    Norm,
    Stream,
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
        for name, least in (("headroom", 0), ("k", 0), ("j", 0), ("reach", 0)):
            given = getattr(self, name)
            if given is not None and not least <= given < 64 and name != "reach":
                raise SpecError(f"{name}: expected {least} to 63, got {given}")
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
        self._exponents: Counter[tuple[Node, Node]] = Counter()
        """(reader, source) -> the power of two by which what is read there is scaled"""

    def run(self) -> list[Site]:
        streams = [pair for pair in find_streams(self._program, self._weights) if self._fits(*pair)]
        if not streams:
            return self._log.sites
        branches = {node: self._branch(node) for _, s in streams for node in self._projections(s)}
        sizes = self._sizes([stream for _, stream in streams], branches)
        for site, stream in streams:
            self._rescale(site, stream, sizes)
        for projection, branch in branches.items():
            self._rescale_branch(projection, branch, sizes)
        self._insert_factors()
        self._report_rest(sizes)
        return self._log.sites

    def _fits(self, site: Node, stream: Stream) -> bool:
        """Whether a stream can be scaled; says why not where it is worth a word."""
        if not stream.is_residual and (stream.blockers or not stream.norms):
            return False  # the input of a norm, not a stream
        if stream.is_residual and self._log.skipped(site):
            return False
        dtypes = {dtype_of(node) for node in self._program.graph.nodes if self._computes(node)}
        if stream.blockers:
            self._log.refused(site, stream.blockers[0][1])
            return False
        if dtypes & {torch.float16, torch.bfloat16}:
            names = " and ".join(sorted(dtype_text(d) for d in dtypes if d is not None))
            self._log.refused(
                site, f"the program computes in {names}: scaling is exact in f32 only"
            )
            return False
        return bool(stream.norms)

    def _computes(self, node: Node) -> bool:
        """Whether a node is a float that depends on the inputs, or is one."""
        return node not in self._weights and is_float(node)

    def _projections(self, stream: Stream) -> list[Node]:
        return [
            node
            for node in stream.members
            if is_call(node, *PROJECTIONS) and foldable(node, self._weights)
        ]

    def _branch(self, projection: Node) -> Branch | None:
        try:
            return find_branch(projection, self._weights)
        except NoMatch:
            return None

    def _sizes(
        self, streams: list[Stream], branches: dict[Node, Branch | None]
    ) -> dict[Node, float]:
        """The largest magnitude of everything that may have to be scaled."""
        chosen = self._options.k is not None and self._options.j is not None
        if not self._cases:
            if chosen:
                return {}
            raise PassError(
                "rescale-residual has no calibration inputs to choose its powers of two by",
                hint="Give both powers: rescale-residual{k=3 j=0}.",
            )
        inside = {node for stream in streams for node in stream.members}
        inside |= {source for stream in streams for _, source in stream.entries}
        inside |= {node for b in branches.values() if b is not None for node in b.members}
        heavy = {n for n in self._program.graph.nodes if has(n, Trait.HEAVY)}
        sizes = largest_values(self._program, self._cases, inside | heavy)
        reached = max((sizes[n] for s in streams for n in s.members if n in sizes), default=0.0)
        if reached < self._options.reach:
            raise PassError(
                f"the calibration inputs reach {reached:.3g} in the residual stream, and it is"
                f" known to reach {self._options.reach:.3g}",
                hint="Give inputs as the model gets them: --prompts FILE or --inputs FILE.",
            )
        return sizes

    def _rescale(self, site: Node, stream: Stream, sizes: dict[Node, float]) -> None:
        largest = max((sizes.get(node, 0.0) for node in stream.members), default=0.0)
        power = self._options.power(largest)
        if stream.is_residual and self._options.k is not None:
            power = self._options.k
        if not power:
            if stream.is_residual:
                self._log.refused(site, f"its values are within fp16's range (max {largest:.3g})")
            return
        lost = [node for node in stream.outputs if sizes.get(node, 0.0) > LARGEST]
        if lost:
            self._log.refused(
                site,
                f"the stream itself is an output, and fp16 does not hold it (max {largest:.3g})",
            )
            return
        if not stream.is_residual and self._log.skipped(site):
            return
        bound = self._bound(stream) if stream.is_residual else ""
        self._scale(stream.members, stream.entries, -power)
        for norm in stream.norms:
            _scale_norm(norm, power)
        for node in stream.outputs:
            self._give_back(node, power)
        writers = len({node for node, _ in stream.entries})
        self._log.done(
            site,
            f"scaled by 2^-{power} ({writers} writers, {len(stream.norms)} norms):"
            f" max {largest:.3g}, now {largest * 2.0**-power:.3g}{bound}",
        )

    def _bound(self, stream: Stream) -> str:
        """What no input exceeds, and the power that would hold even that."""
        most = largest_for_any_input(self._program, self._weights, stream.members)
        if most is None:
            return ""
        power = max(0, math.ceil(math.log2(most / LARGEST))) if most else 0
        return f"; no input exceeds {most:.3g}, which k={power} holds"

    def _rescale_branch(
        self, projection: Node, branch: Branch | None, sizes: dict[Node, float]
    ) -> None:
        if branch is None:
            return
        largest = max((sizes.get(node, 0.0) for node in branch.members), default=0.0)
        power = self._options.power(largest) if self._options.j is None else self._options.j
        if not power or self._log.skipped(projection):
            return
        self._scale(branch.members, branch.entries, -power)
        is_addmm = is_call(projection, aten.addmm.default)
        weight = projection.args[2 if is_addmm else 1]
        assert isinstance(weight, Node)
        self._exponents[projection, weight] += power  # the bias is not in the product
        self._log.done(
            projection,
            f"reads a product scaled by 2^-{power}:"
            f" max {largest:.3g}, now {largest * 2.0**-power:.3g}",
        )

    def _scale(
        self, members: tuple[Node, ...], entries: tuple[tuple[Node, Node], ...], exponent: int
    ) -> None:
        """Scale what comes in; say of every member that it is scaled."""
        for entry in entries:
            self._exponents[entry] += exponent
        for node in members:
            mark_scaled(node, exponent)
        self._scaled.update(members)

    def _insert_factors(self) -> None:
        graph = self._program.graph
        for (reader, source), exponent in self._exponents.items():
            if exponent:
                with graph.inserting_before(reader):
                    args = (source, 2.0**exponent)
                    factor = insert(graph, aten.mul.Tensor, args, like=reader)
                factor.meta.pop(SCALE, None)  # of the reader
                reader.replace_input_with(source, factor)

    def _give_back(self, node: Node, power: int) -> None:
        """Return the stream as it was."""
        output = self._program.graph.output_node()
        with self._program.graph.inserting_before(output):
            whole = insert(self._program.graph, aten.mul.Tensor, (node, 2.0**power), like=node)
        mark_scaled(whole, power)
        output.replace_input_with(node, whole)

    def _report_rest(self, sizes: dict[Node, float]) -> None:
        """Name what is beyond fp16 and no power of two reaches."""
        for node, size in sizes.items():
            if size > LARGEST and node not in self._scaled and node not in self._weights:
                self._log.refused(
                    node,
                    f"its values leave fp16's range (max {size:.3g} > {LARGEST:.0f}), and no power"
                    f" of two passes through what reads it: {WAY_OUT}",
                )


def _scale_norm(norm: Norm, power: int) -> None:
    """Let a norm read a value scaled by 2^-power."""
    epsilon = norm.epsilon * 4.0**-power
    node = norm.node
    if is_call(node, aten.rms_norm.default):
        source, sizes, weight, _ = (*node.args, None, None)[:4]
        node.args = (source, sizes, weight, epsilon)
    else:
        left, right = node.args[:2]
        node.args = (left, epsilon) if isinstance(left, Node) else (epsilon, right)
    for inner, times in norm.inner.items():
        mark_scaled(inner, -power * times)
