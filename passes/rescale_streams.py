"""Scale what feeds norms down by powers of two, exactly, so that it fits into fp16.

    norm(2^-k h, 4^-k eps) = norm(h, eps)        RMS, Layer, Group and Instance norms, bit for bit

    before (T5, its stream reaches 1.4e5):       after, k = 3:
        %h0 = embedding(%e, %ids)                    %h0 = embedding(%e * 2^-3, %ids)
        %n = %h0 * rsqrt(mean(%h0^2) + 1e-06)        %n = %h0 * rsqrt(mean(%h0^2) + 1e-06 * 2^-6)
        %g = gelu(linear(%n, %wi_0))                 %g = gelu(linear(%n, %wi_0))
        %p = %g * linear(%n, %wi_1)                  %p = %g * linear(%n, %wi_1 * 2^-1)
        %h1 = %h0 + linear(%p, %wo)                  %h1 = %h0 + linear(%p, %wo * 2^(1-3))

Each scale-free region (`analyses.scale_free`) whose values leave fp16's range gets its own k: the
residual stream, the input of an inner norm, a product in a feed-forward (above: j), values before
their output projection.  Everything that enters is scaled by 2^-k, weights where a weight does it,
else the value; what is read at its true scale is scaled back.  Powers of two change no rounding, so
in fp32 every value keeps its bits, up to the power of two.

k is the smallest that leaves `headroom` bits between the largest value over the calibration inputs
and fp16's largest.  Weights are scaled by an expression: nothing is computed here.

Inputs, and what an output, a softmax or an activation reads at its true scale, fp16 may not hold.
They are marked to stay in fp32, with what reads them (`precision.out_of_range`).

Must not happen: a region of another dtype than fp32 (what fp16 already rounded would not keep its
bits).
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from enginecast.errors import PassError, SpecError
from enginecast.passes.analyses.scale_free import Norm, Region, find_regions, set_epsilon, why_not
from enginecast.passes.analyses.value_bounds import (
    Magnitudes,
    largest_for_any_input,
    magnitudes,
)
from enginecast.passes.ir.base import Pass, PassContext, Promise, Site
from enginecast.passes.ir.edit import (
    SCALE,
    aten,
    dtype_of,
    first_input,
    insert,
    is_float,
    weight_expressions,
)
from enginecast.passes.ir.match import is_call, real_users
from enginecast.passes.ir.scaled_values import mark_scaled, scale_of
from enginecast.passes.ir.sites import SiteLog
from enginecast.passes.ir.source import module_path, source_line
from enginecast.passes.ir.text import dtype_text
from enginecast.passes.ir.traits import Trait, has
from enginecast.passes.precision.cast_borders import is_rounding
from enginecast.passes.precision.out_of_range import keep_in_fp32

LARGEST = torch.finfo(torch.float16).max
FITTED_KEY = "enginecast_fitted"
DENSE = (Trait.RESHAPES, Trait.PERMUTES, Trait.IDENTITY)
"""Of what moves values, ops that leave no gaps between them."""


@dataclass(frozen=True)
class Fitted:
    """Values that plain fp16 does not hold, or barely, and what is done about them."""

    module: str
    source: str
    """Of the norm, or else the first other reader."""
    values: int
    """How many of the program's values are treated alike."""
    largest: float
    """Over the calibration inputs, as the model has it."""
    power: int | None
    """They are scaled by 2^-power; None: they stay in fp32."""
    subnormal: float
    """Share of the elements that lose digits because the power makes them subnormal in fp16."""
    reason: str = ""
    """Why they stay in fp32."""
    is_output: bool = False
    """Whether that is because the model gives them."""

    @property
    def plain(self) -> str:
        """What the plain conversion to fp16 would make of them; empty if they are all zero, or were
        not measured."""
        if self.largest > LARGEST:
            return "infinite"
        return f"{math.log2(LARGEST / self.largest):.1f} bits left" if self.largest else ""

    @property
    def headroom_bits(self) -> float | None:
        """How many times they may double; None in fp32, or where `plain` is empty."""
        if self.power is None or not self.largest:
            return None
        return math.log2(LARGEST / self.largest) + self.power


def fitted(program: ExportedProgram) -> tuple[Fitted, ...]:
    """What `rescale-streams` did to a program; structural copies keep it."""
    found: tuple[Fitted, ...] = program.graph_module.meta.get(FITTED_KEY, ())
    return found


@dataclass(frozen=True)
class RescaleStreams(Pass):
    """Scale what feeds norms and weights by powers of two, so that fp16 holds it."""

    name: ClassVar[str] = "rescale-streams"
    promise: ClassVar[Promise] = "exact"

    headroom: int = 1
    """Bits between the largest calibrated value and fp16's largest, at least."""
    k: int | None = None
    """Scale every residual stream by 2^-k, whatever its values are."""
    j: int | None = None
    """Scale every product in a feed-forward by 2^-j, whatever its values are."""
    reach: float = 0.0
    """What a residual stream is known to reach: calibration inputs that stay below are refused."""

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
        self, options: RescaleStreams, program: ExportedProgram, context: PassContext
    ) -> None:
        self._options = options
        self._program = program
        self._cases = context.calibration
        self._log = SiteLog(context)
        self._weights = weight_expressions(program)
        self._found: dict[Node, Magnitudes] = {}
        self._sizes: dict[Node, float] = {}
        """The largest magnitude of every value as it was, what is inserted here included."""
        self._exponents: Counter[tuple[Node, Node]] = Counter()
        """(reader, source) -> the power of two by which what is read there is scaled"""
        self._fitted: list[Fitted] = []

    def run(self) -> list[Site]:
        regions = list(find_regions(self._program, self._weights))
        nodes = set(self._program.graph.nodes) - self._weights
        calls = (node for node in nodes if node.op == "call_function" and not is_rounding(node))
        dtypes = {dtype_of(node) for node in filter(is_float, calls)}
        if dtypes & {torch.float16, torch.bfloat16}:
            names = " and ".join(sorted(map(dtype_text, dtypes)))
            for region in regions:
                if region.is_residual:
                    self._log.refused(
                        region.site,
                        f"the program computes in {names}: scaling is exact in f32 only",
                    )
            return self._log.sites
        if not self._measure(regions):
            return self._log.sites
        for region in regions:
            self._rescale(region)
        for (reader, source), exponent in self._exponents.items():
            if exponent:
                factor = self._times(source, exponent, before=reader, like=reader)
                factor.meta.pop(SCALE, None)  # of the reader
                if source in self._sizes:
                    self._sizes[factor] = self._sizes[source] * 2.0**exponent
                reader.replace_input_with(source, factor)
        self._keep_in_fp32()
        self._program.graph_module.meta[FITTED_KEY] = tuple(self._fitted)
        return self._log.sites

    def _keep_in_fp32(self) -> None:
        """Mark what is beyond fp16 and no power of two reaches."""
        held = {node: size * 2.0 ** _exponent(node) for node, size in self._sizes.items()}
        limit = LARGEST * 2.0**-self._options.headroom
        for node in keep_in_fp32(self._program, held, limit):
            user, is_input = real_users(node)[0], node.op == "placeholder"
            reason = "it is an input" if is_input else why_not(user)
            place = (f"input '{node.name}'", "") if is_input else _place(node)
            self._log.done(node, f"stays in fp32 (max {held[node]:.3g}): {reason}")
            out = user.op == "output"
            self._fitted.append(Fitted(*place, 1, held[node], None, 0.0, reason, out))

    def _measure(self, regions: Sequence[Region]) -> bool:
        """Whether there is anything to do."""
        if not self._cases:
            given = self._options.k is not None and self._options.j is not None
            if given or not any(region.is_residual for region in regions):
                return given
            raise PassError(
                f"{self._options.name} has no calibration inputs to choose its powers of two by",
                hint=f"Give both powers: {self._options.name}{{k=3 j=0}}.",
            )
        watched = set(filter(is_float, self._program.graph.nodes)) - self._weights
        inside = {node for region in regions for node in region.members}
        self._found = magnitudes(self._program, self._cases, watched, inside)
        self._sizes = {node: found.largest for node, found in self._found.items()}
        reached = self._largest(n for one in regions if one.is_residual for n in one.members)
        if reached < self._options.reach:
            raise PassError(
                f"the calibration inputs reach {reached:.3g} in the residual stream, and it is"
                f" known to reach {self._options.reach:.3g}",
                hint="Give inputs as the model gets them: --prompts FILE or --inputs FILE.",
            )
        return True

    def _largest(self, nodes: Iterable[Node]) -> float:
        return max((self._sizes.get(node, 0.0) for node in nodes), default=0.0)

    def _rescale(self, region: Region) -> None:
        site, largest = region.site, self._largest(_held(region))
        power = self._options.power(largest)
        if region.is_residual and self._options.k is not None:
            power = self._options.k
        if not region.is_residual and _holds_product(region) and self._options.j is not None:
            power = self._options.j
        if not power:
            if region.is_residual:
                self._log.refused(site, f"its values are within fp16's range (max {largest:.3g})")
            return
        if self._log.skipped(site):
            return
        bound, most = "", None
        if region.is_residual:  # what no input exceeds, and the power that would hold even that
            most = largest_for_any_input(self._program, self._weights, region.members)
        if most is not None:
            holds = max(0, math.ceil(math.log2(most / LARGEST))) if most else 0
            bound = f"; no input exceeds {most:.3g}, which k={holds} holds"
        self._scale(region, power)
        small = max(
            (self._found[node].subnormal(power) for node in region.members if node in self._found),
            default=0.0,
        )
        self._fitted.append(Fitted(*_place(site), len(region.members), largest, power, small))
        writers = len({*region.layers, *(node for node, _ in region.entries)})
        readers = {"norms": len(region.norms), "layers": len(region.through)}
        readers["others"] = len({user for users in region.readers.values() for user in users})
        read = ", ".join(
            f"{count} {what[:-1] if count == 1 else what}"
            for what, count in readers.items()
            if count
        )
        lost = f", {small:.1%} of a value's elements become subnormal" if small >= 0.001 else ""
        self._log.done(
            site,
            f"scaled by 2^-{power} ({writers} writers, {read}):"
            f" max {largest:.3g}, now {largest * 2.0**-power:.3g}{lost}{bound}",
        )

    def _scale(self, region: Region, power: int) -> None:
        for member, layer in region.layers.items():
            for weight in dict.fromkeys((*layer.times, *layer.plus)):
                self._exponents[member, weight] -= power
        for entry in region.entries:
            self._exponents[entry] -= power
        for reader, layer in region.through:
            for weight in layer.times:
                self._exponents[reader, weight] += power
        for norm in region.norms:
            self._scale_norm(norm, power)
        for member in region.members:
            mark_scaled(member, -power)
        inside = frozenset(region.members)
        for member, users in region.readers.items():  # as it was
            whole = self._as_it_was(member, power, inside, before=min(users))
            for user in users:
                user.replace_input_with(member, whole)

    def _scale_norm(self, norm: Norm, power: int) -> None:
        set_epsilon(norm.node, norm.epsilon * 2.0 ** (-power * norm.degree))
        for inner, times in norm.inner.items():
            mark_scaled(inner, -power * times)

    def _as_it_was(self, member: Node, power: int, inside: Set[Node], *, before: Node) -> Node:
        """A member at its true scale, in the layout that it has: kernels of the same op differ in
        their last bit between a part of a tensor and a tensor of its own.
        """
        source, moves = member, list[Node]()
        while has(source, Trait.MOVES):
            moves.append(source)
            source = first_input(source)
        if not any(has(node, Trait.MOVES) and not has(node, *DENSE) for node in moves):
            source, moves = member, []
        whole = source  # if it is from outside, it has its true scale
        if source in inside:
            whole = self._times(source, power, before=before, like=source)
            mark_scaled(whole, power)
            self._keep_size(whole, member)
        graph = self._program.graph
        with graph.inserting_before(before):
            for node in reversed(moves):
                args = (whole, *node.args[1:])
                whole = insert(graph, node.target, args, dict(node.kwargs), like=node)  # type: ignore[arg-type]
                mark_scaled(whole, power)
                self._keep_size(whole, member)
        return whole

    def _keep_size(self, node: Node, like: Node) -> None:
        if like in self._sizes:
            self._sizes[node] = self._sizes[like]

    def _times(self, source: Node, power: int, *, before: Node, like: Node) -> Node:
        graph = self._program.graph
        with graph.inserting_before(before):
            return insert(graph, aten.mul.Tensor, (source, 2.0**power), like=like)


def _held(region: Region) -> list[Node]:
    """What fp16 has to hold of a region: its members, and their lengths where a norm divides by
    them."""
    lengths = [node for norm in region.norms if norm.degree == 1 for node in norm.inner]
    return [*region.members, *lengths]


def _place(node: Node) -> tuple[str, str]:
    return module_path(node), source_line(node)


def _exponent(node: Node) -> int:
    """The power of two by which a value is scaled; 0 where channels have one each."""
    exponent = scale_of(node)
    return exponent if isinstance(exponent, int) else 0


def _holds_product(region: Region) -> bool:
    """Whether a feed-forward's product, or its ReLU, is what linears read of a region."""
    return bool(region.through) and any(
        is_call(node, aten.mul.Tensor, aten.relu.default) and node not in region.layers
        for node in region.members
    )


@dataclass(frozen=True)
class RescaleResidual(RescaleStreams):
    """rescale-streams, by its older name."""

    name: ClassVar[str] = "rescale-residual"
