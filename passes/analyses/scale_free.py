"""Find the scale-free regions of a program: values that can be scaled by one power of two, at no
cost and without another rounding.

    %h = conv2d(%x, %w, %b)              <- the region is entered: %w and %b take the factor
    %s = add(%h, unsqueeze(%temb))       <- a sum of values that are scaled alike
    %n = group_norm(%s, 32, ..., eps)    <- left: a norm gives the same, if epsilon is scaled, too
    %y = linear(%s, %v, %c)              <- left: %v takes the inverse, and %c nothing

A region grows through sums, views, joins, pools, resampling and products with one other value, in
both directions, whatever modules are called.  It is entered where a weight, or any value from
outside, comes in.  It is left at norms over rows, channels or groups, since

    norm(2^-k h, 4^-k eps) = norm(h, eps)

bit for bit: RMS norms, and those that subtract the mean.  It is also left at linears and
convolutions, whose weights take the inverse factor; everything else that reads it needs the value
as it was.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import Node

from enginecast.passes.analyses.norms import is_statistic, normalized
from enginecast.passes.analyses.residual_stream import SUMS, residual_sums
from enginecast.passes.ir.edit import (
    arguments,
    aten,
    dtype_of,
    first_input,
    is_float,
    same_shape,
    shape_of,
    value,
)
from enginecast.passes.ir.match import NoMatch, is_call, is_float_cast, op_name, real_users
from enginecast.passes.ir.pattern import Match
from enginecast.passes.ir.traits import Trait, has

_LAYERS: dict[Any, tuple[int | None, tuple[int, ...], tuple[int, ...]]] = {
    aten.linear.default: (0, (1,), (2,)),
    **{
        op: (0, (1,), (2,))
        for op in (
            aten.conv1d.default,
            aten.conv2d.default,
            aten.conv3d.default,
            aten.conv_transpose1d.default,
            aten.conv_transpose2d.input,
            aten.conv_transpose3d.input,
        )
    },
    aten.addmm.default: (1, (2,), (0,)),
    aten.mm.default: (0, (1,), ()),
    aten.matmul.default: (0, (1,), ()),
    aten.embedding.default: (None, (0,), ()),
    aten.rms_norm.default: (None, (2,), ()),
    aten.layer_norm.default: (None, (2,), (3,)),
    aten.group_norm.default: (None, (2,), (3,)),
    aten.instance_norm.default: (None, (1,), (2,)),
}
"""Op -> indices of what its result is proportional to, of weights that multiply it, and of weights
that are added."""
_EPSILON: dict[Any, tuple[int, float]] = {
    aten.rms_norm.default: (3, 2.0**-23),  # without one, torch takes that of fp32
    aten.layer_norm.default: (4, 1e-5),
    aten.group_norm.default: (4, 1e-5),
    aten.instance_norm.default: (7, 1e-5),
}
"""Norm -> index of its epsilon, and what it is if it is not given."""
_PRODUCTS = frozenset({aten.mul.Tensor, aten.matmul.default, aten.bmm.default})
_PROPORTIONAL = frozenset(
    {
        aten.avg_pool1d.default,
        aten.avg_pool2d.default,
        aten.adaptive_avg_pool1d.default,
        aten.adaptive_avg_pool2d.default,
        aten.max_pool1d.default,
        aten.max_pool2d.default,
        aten.max_pool3d.default,
        aten.upsample_nearest1d.vec,
        aten.upsample_nearest2d.vec,
        aten.upsample_nearest3d.vec,
        aten.upsample_bilinear2d.vec,
        aten.upsample_trilinear3d.vec,
        aten.leaky_relu.default,
    }
)
"""Ops beside those with the trait, whose result is proportional to their first argument."""
_GUARDS = frozenset({aten.isinf.default, aten.isfinite.default, aten.clamp.default})


@dataclass(frozen=True)
class Layer:
    """An op with weights that scale its result."""

    data: Node | None
    """What the result is proportional to besides; None: nothing that varies in size."""
    times: tuple[Node, ...]
    """Weights that multiply it."""
    plus: tuple[Node, ...]
    """Weights that are added."""


@dataclass(frozen=True)
class Norm:
    """A norm that reads a region."""

    node: Node
    """The node that adds epsilon, or cuts at it, or the norm's own op."""
    epsilon: float
    inner: Mapping[Node, int] = field(default_factory=dict)
    """Inner values that scale with the region -> multiple of its exponent."""
    degree: int = 2
    """Multiple of the region's exponent that epsilon takes."""


@dataclass(frozen=True)
class Region:
    """Values that scale together, in graph order."""

    members: tuple[Node, ...]
    layers: Mapping[Node, Layer]
    """Members whose weights are scaled."""
    entries: tuple[tuple[Node, Node], ...]
    """(member, source) pairs: a weight or value from outside that is scaled for that member."""
    norms: tuple[Norm, ...]
    through: tuple[tuple[Node, Layer], ...]
    """Readers whose weights take the inverse factor."""
    readers: Mapping[Node, tuple[Node, ...]]
    """Member -> what else reads it, the graph's output included: it has to be as it was."""
    is_residual: bool
    """Whether a residual sum is among the members."""

    @property
    def site(self) -> Node:
        """Where a report places the region: at its first norm, or else at its first reader."""
        others = (user for users in self.readers.values() for user in users if user.op != "output")
        for found in ([n.node for n in self.norms], [n for n, _ in self.through], others):
            if nodes := sorted(found):
                return nodes[0]
        return self.members[-1]


def find_regions(program: ExportedProgram, weights: set[Node]) -> Iterator[Region]:
    """Every region of a program, in graph order.

    Args:
        program: before its norms are fused, or after.
        weights: the weight expressions.
    """
    return _Regions(program, weights).find()


def layer_of(node: Node, weights: set[Node]) -> Layer | None:
    """The weights that scale the result of a node; None if there are none."""
    args = arguments(node)
    if is_call(node, aten.mul.Tensor):
        weighted = tuple(a for a in args[:2] if a in weights)
        others = tuple(a for a in args[:2] if a not in weights)
        if len(weighted) != 1:
            return None
        data = others[0] if isinstance(others[0], Node) else None
        return Layer(data, weighted, ())
    found = _LAYERS.get(node.target)
    if found is None or node.kwargs:  # addmm has factors
        return None
    index, *places = found
    if is_call(node, aten.matmul.default) and args[0] in weights:
        index, places = 1, [(0,), ()]
    given = [[args[i] for i in side if i < len(args)] for side in places]
    times, plus = (tuple(one for one in side if one is not None) for side in given)
    if not times or not weights.issuperset((*times, *plus)):
        return None
    return Layer(None if index is None else args[index], times, plus)


class _Regions:
    def __init__(self, program: ExportedProgram, weights: set[Node]) -> None:
        self._program = program
        self._weights = weights
        self._sums = residual_sums(program)
        self._norms: dict[Node, Norm] = {}
        """By the nodes through which they read."""
        self._apart: set[Node] = set()
        """Values inside of norms, which are scaled with them or stay in fp32."""
        for node in program.graph.nodes:
            if node.target in _EPSILON:
                self._add_norm(node)
            elif is_statistic(node):
                self._add_spelled_out(node)
            elif is_call(node, aten.div.Tensor):
                self._add_normalize(node)
        self._layers: dict[Node, Layer] = {}
        self._carried: dict[Node, tuple[Node, ...]] = {}
        """What a node's result is proportional to if all of it is scaled alike."""

    def _add_norm(self, node: Node) -> None:
        index, default = _EPSILON[node.target]
        args = arguments(node)
        if is_call(node, aten.instance_norm.default) and not args[5]:
            return  # with running statistics, it is linear
        given = args[index] if index < len(args) else None
        self._norms[node] = Norm(node, default if given is None else float(given))

    def _add_spelled_out(self, mean: Node) -> None:
        square = first_input(mean)
        self._apart.update((mean, square))
        try:
            match = normalized.match(mean)
            norm = Norm(match.node("plus"), match.number("epsilon"), _inner(match))
        except NoMatch:
            return
        self._apart.update(norm.inner, (match.root,))
        self._norms[square] = self._norms[match.root] = norm

    def _add_normalize(self, quotient: Node) -> None:
        """x / max(|x|, eps), as `torch.nn.functional.normalize` divides."""
        source, divisor = quotient.args
        inner: dict[Node, int] = {}
        while has(divisor, Trait.MOVES):
            inner[divisor] = 1
            divisor = divisor.args[0]
        if not is_call(divisor, aten.clamp_min.default):
            return
        length, epsilon = arguments(divisor)
        if not is_call(length, aten.linalg_vector_norm.default) or length.args[0] is not source:
            return
        inner |= {divisor: 1, length: 1}
        if all(len(real_users(node)) == 1 for node in inner):
            self._norms[length] = self._norms[quotient] = Norm(divisor, float(epsilon), inner, 1)
            self._apart.update(inner, (quotient,))

    def find(self) -> Iterator[Region]:
        nodes = [n for n in self._program.graph.nodes if self._can_scale(n)]
        cut: set[Node] = set()
        while True:
            others = self._connect(nodes, cut)
            region_of = _joined(self._carried)
            # A product of two values of one region would be scaled twice.
            twice = {n for n, other in others if region_of.get(other) is region_of[n]}
            if not twice:
                break
            cut |= twice
        groups: dict[Node, list[Node]] = {}
        for node in nodes:
            if node in region_of:
                groups.setdefault(region_of[node], []).append(node)
        for region in map(self._region, groups.values()):
            if region.norms or region.through:  # else nothing of it is read at another scale
                yield region

    def _can_scale(self, node: Node) -> bool:
        if node.op != "call_function" or node in self._weights or node in self._apart:
            return False
        fake = value(node)
        return is_float(node) or (isinstance(fake, tuple | list) and has(node, Trait.MOVES))

    def _connect(self, nodes: Iterable[Node], cut: set[Node]) -> list[tuple[Node, Node]]:
        """Find layers and what is carried on; gives each product with its other factor."""
        self._layers, self._carried = {}, {}
        reaches: set[Node] = set()  # values that a weight can scale
        others: list[tuple[Node, Node]] = []
        for node in nodes:
            layer = layer_of(node, self._weights)
            if layer is not None:
                self._layers[node], self._carried[node] = layer, ()
                reaches.add(node)
                continue
            if node in cut or (node in self._norms and node.target in _EPSILON):
                continue
            sources = self._sources(node, reaches)
            if not sources:
                continue
            self._carried[node] = sources
            if reaches.intersection(sources):
                reaches.add(node)
            if node.target in _PRODUCTS:
                factors = [a for a in node.args[:2] if isinstance(a, Node)]
                others += [(node, factor) for factor in factors if factor is not sources[0]]
        return others

    def _sources(self, node: Node, reaches: set[Node]) -> tuple[Node, ...]:
        args = arguments(node)
        if is_float_cast(node) and torch.float16 in (dtype_of(node), dtype_of(args[0])):
            return ()  # at another scale, it would lose or keep other small values
        if has(node, Trait.JOINS):
            return tuple(dict.fromkeys(args[0])) if all(map(is_float, args[0])) else ()
        if is_call(node, aten.where.self, *SUMS):
            both = args[1:3] if is_call(node, aten.where.self) else args[:2]
            return tuple(dict.fromkeys(both)) if all(map(is_float, both)) else ()
        if node.target in _PRODUCTS:
            factors = [a for a in args[:2] if isinstance(a, Node) and is_float(a)]
            if len(factors) == 2 and factors[0] is factors[1]:
                return ()
            if len(args[:2]) > len(factors) == 1:
                return (factors[0],)  # a number, or a mask of integers
            # The value that a weight can scale, and of two such values the larger one: a gate
            # that is the same for all rows is computed for other readers, too.
            same = [f for f in factors if same_shape(shape_of(f), shape_of(node))]
            fit = [f for f in (*same, *factors) if f in reaches]
            return tuple(fit[:1])
        if is_call(node, aten.scaled_dot_product_attention.default):
            return (args[2],) if args.count(args[2]) == 1 else ()  # else keys take the factor, too
        if is_call(node, aten.div.Tensor):
            return args[:1] if is_float(args[0]) and args[0] is not args[1] else ()
        zero = (
            (is_call(node, aten.masked_fill.Scalar) and args[2] == 0)
            or (is_call(node, aten.constant_pad_nd.default) and not (args[2:] and args[2]))
            or (is_call(node, aten.pad.default) and not (args[3:] and args[3]))
        )
        if zero or node.target in _PROPORTIONAL or has(node, Trait.HOMOGENEOUS):
            source = args[0]
            several = isinstance(source, Node) and isinstance(value(source), tuple | list)
            fits = has(source, Trait.MOVES) if several else is_float(source)
            return (source,) if fits else ()
        return ()

    def _region(self, members: list[Node]) -> Region:
        inside = set(members)
        entries: list[tuple[Node, Node]] = []
        norms: dict[Node, Norm] = {}
        through: dict[Node, Layer] = {}
        readers: dict[Node, tuple[Node, ...]] = {}
        for node in members:
            entries += [(node, s) for s in self._carried[node] if s not in inside]
            rest = []
            for user in real_users(node):
                layer = self._layers.get(user)
                if user in self._norms:
                    norms[self._norms[user].node] = self._norms[user]
                elif layer is not None and layer.data is node:
                    through[user] = layer
                elif not (user in inside and node in self._carried[user]) and not _is_blind(
                    node, user
                ):
                    rest.append(user)
            if rest:
                readers[node] = tuple(rest)
        return Region(
            members=tuple(members),
            layers={node: self._layers[node] for node in members if node in self._layers},
            entries=tuple(entries),
            norms=tuple(norms[node] for node in sorted(norms)),
            through=tuple((node, through[node]) for node in sorted(through)),
            readers=readers,
            is_residual=not inside.isdisjoint(self._sums),
        )


def _joined(carried: Mapping[Node, Iterable[Node]]) -> dict[Node, Node]:
    """A node that stands for each one's region: those that carry one another on are in one."""
    parent = {node: node for node in carried}

    def root(node: Node) -> Node:
        while parent[node] is not node:
            parent[node] = node = parent[parent[node]]
        return node

    for node, sources in carried.items():
        for source in sources:
            if source in parent:
                parent[root(source)] = root(node)
    return {node: root(node) for node in carried}


def _is_blind(node: Node, user: Node) -> bool:
    """Whether a reader's result does not depend on the values of a node."""
    if user.op == "output":
        return False
    like = has(user, Trait.MOVES, Trait.CASTS) and user.args[0] is not node
    return like or has(user, Trait.METADATA) or not isinstance(value(user), Tensor | tuple | list)


def why_not(reader: Node) -> str:
    """Why a reader's result depends on the scale, for users."""
    if reader.op == "output":
        return "it is an output"
    if is_call(reader, *_GUARDS):
        return f"{op_name(reader)} reads it: a guard against overflow, which has a limit"
    return f"{op_name(reader)} reads it, and is not the same at another scale"


def _inner(norm: Match) -> dict[Node, int]:
    """The values inside a norm that scale; raises NoMatch if something else reads them."""
    inner = {norm.node(name): 2 for name in ("square", "mean", "plus")}
    root = norm.node("root")
    inner[root] = -1 if is_call(root, aten.rsqrt.default) else 1
    for node in list(inner):
        users = real_users(node)
        if len(users) != 1:
            raise NoMatch(node, f"{op_name(node)} in a norm has {len(users)} readers")
        if is_call(users[0], aten.reciprocal.default):
            inner[users[0]] = -1
    return inner


def set_epsilon(norm: Node, epsilon: float) -> None:
    """Change the epsilon of `Norm.node`."""
    if norm.target in _EPSILON:
        index, _ = _EPSILON[norm.target]
        args = [*norm.args, *(None for _ in range(index + 1 - len(norm.args)))]
    else:  # a sum with it, or a cut at it
        args = list(norm.args)
        index = 0 if isinstance(args[1], Node) else 1
    args[index] = epsilon
    norm.args = tuple(args)
