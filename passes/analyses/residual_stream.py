"""Find the residual streams of a program, whatever its modules are called.

    %norm = norm(%h)
    %branch = linear(gelu(linear(%norm)))
    %sum = add(%h, %branch)                 <- a residual sum: its one addend is made from the other

`residual_sums` are found by that alone: the norm may stand before the branch (T5, Llama, ViT) or
after the sum (BERT).  Sums that are made in place are not found.

A stream is a set of values that only scale together: sums, and what carries them on (views, casts,
dropout, cuts, joins).  It is entered where a linear, an embedding or a product with a weight comes
in, whose weights can be scaled instead, or where any other value does.  It is read by norms and
outputs; whatever else reads it *blocks* it, because its result would not be the same at another
scale.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import Node

from enginecast.passes.analyses.norms import is_statistic, normalized
from enginecast.passes.ir.edit import (
    arguments,
    aten,
    first_input,
    is_float,
    same_shape,
    shape_of,
    value,
    weight_expressions,
)
from enginecast.passes.ir.match import (
    NoMatch,
    behind_casts,
    is_call,
    op_name,
    real_users,
    scalar_operand,
)
from enginecast.passes.ir.pattern import Match
from enginecast.passes.ir.traits import Trait, has

SUMS = frozenset({aten.add.Tensor, aten.sub.Tensor})
WEIGHTED: dict[Any, tuple[int, ...]] = {
    aten.linear.default: (1, 2),
    aten.embedding.default: (0,),
    aten.conv1d.default: (1, 2),
    aten.conv2d.default: (1, 2),
    aten.addmm.default: (0, 2),
    aten.mm.default: (1,),
    aten.matmul.default: (1,),
    aten.rms_norm.default: (2,),
    aten.layer_norm.default: (2, 3),
}
"""Op -> indices of the arguments that together scale its result."""
GUARDS = frozenset({aten.isinf.default, aten.isfinite.default, aten.clamp.default})


@dataclass(frozen=True)
class Norm:
    """A root-mean-square norm that reads a stream."""

    node: Node
    """The node that adds epsilon, or an aten.rms_norm."""
    epsilon: float
    inner: dict[Node, int] = field(default_factory=dict)
    """Inner values that scale with the stream -> multiple of its exponent."""


@dataclass(frozen=True)
class Stream:
    """Values that scale together."""

    members: tuple[Node, ...]
    entries: tuple[tuple[Node, Node], ...]
    """(member, source) pairs: a source is a weight or value from outside that must be scaled for
    that member."""
    norms: tuple[Norm, ...]
    outputs: tuple[Node, ...]
    """Members that the program returns."""
    blockers: tuple[tuple[Node, str], ...]
    """Readers whose result depends on the scale, and why."""
    is_residual: bool
    """Whether a residual sum is among the members."""


def find_streams(program: ExportedProgram, weights: set[Node]) -> Iterator[tuple[Node, Stream]]:
    """Every stream, with the first norm that reads it, in graph order.

    Args:
        program: before its norms are fused, or after.
    """
    search = _Streams(program, weights)
    seen: set[Node] = set()
    for site, seed in search.seeds:
        if seed not in seen and search.can_carry(seed):
            stream = search.grow(seed)
            seen.update(stream.members)
            yield site, stream


def foldable(node: Node, weights: set[Node]) -> tuple[Node, ...]:
    """The weight expressions that can scale the result of `node`; empty if there are none."""
    args = arguments(node)
    if is_call(node, aten.mul.Tensor):
        weighted = tuple(a for a in args[:2] if a in weights)
        return weighted if len(weighted) == 1 else ()
    given = [args[p] for p in WEIGHTED.get(node.target, ()) if p < len(args)]
    given = [argument for argument in given if argument is not None]
    return tuple(given) if weights.issuperset(given) else ()


def carried(node: Node) -> tuple[Node, ...]:
    """The arguments that scale the result of `node` if all of them are scaled alike."""
    args = arguments(node)
    if has(node, Trait.JOINS):
        return tuple(args[0])
    if is_call(node, aten.where.self, *SUMS):
        both = args[1:3] if is_call(node, aten.where.self) else args[:2]
        return both if all(isinstance(operand, Node) for operand in both) else ()
    if is_call(node, aten.mul.Tensor):
        split = scalar_operand(node, aten.mul.Tensor)
        return (split[0],) if split is not None else ()
    division = is_call(node, aten.div.Tensor) and not isinstance(args[1], Node)
    zeros = is_call(node, aten.masked_fill.Scalar) and args[2] == 0
    return (
        args[:1]
        if (division or zeros or has(node, Trait.HOMOGENEOUS)) and is_float(args[0])
        else ()
    )


class _Streams:
    """The norms of a program, and the streams that they read."""

    def __init__(self, program: ExportedProgram, weights: set[Node]) -> None:
        self._weights = weights
        self._sums = residual_sums(program)
        self._norms: dict[Node, Norm] = {}
        """By the nodes through which they read."""
        self._reasons: dict[Node, str] = {}
        self.seeds: list[tuple[Node, Node]] = []
        """(where a norm stands, what it reads)"""
        for node in program.graph.nodes:
            if is_call(node, aten.rms_norm.default, aten.layer_norm.default):
                source, sizes, _, epsilon = (*arguments(node), None, None)[:4]
                if is_call(node, aten.rms_norm.default) and len(sizes) == 1:
                    # Without epsilon torch takes that of fp32, in which the program computes.
                    self._norms[node] = Norm(node, 2.0**-23 if epsilon is None else float(epsilon))
                self.seeds.append((node, source))
            elif is_statistic(node):
                square = first_input(node)
                try:
                    match = normalized.match(node)
                    norm = Norm(match.node("plus"), match.number("epsilon"), _inner(match))
                except NoMatch as miss:
                    self._reasons[square] = miss.reason
                    self.seeds.append((node, first_input(square)))
                    continue
                self._norms[square] = self._norms[match.root] = norm
                self.seeds.append((node, match.node("measured")))

    def can_carry(self, node: Node) -> bool:
        if node in self._weights or node.op != "call_function":
            return False
        return bool(carried(node) or foldable(node, self._weights))

    def grow(self, seed: Node) -> Stream:
        """The stream that `seed` is part of."""
        members: set[Node] = set()
        entries: list[tuple[Node, Node]] = []
        norms: dict[Node, Norm] = {}
        outputs: set[Node] = set()
        blockers: dict[Node, str] = {}
        waiting = [seed]
        while waiting:
            node = waiting.pop()
            if node in members:
                continue
            members.add(node)
            own = foldable(node, self._weights)
            for source in dict.fromkeys(own or carried(node)):
                if not own and self.can_carry(source):
                    waiting.append(source)
                else:
                    entries.append((node, source))
            for user in real_users(node):
                if user.op == "output":
                    outputs.add(node)
                elif user in self._norms:
                    norms[self._norms[user].node] = self._norms[user]
                elif node in carried(user):
                    waiting.append(user)
                elif isinstance(value(user), Tensor | tuple | list):
                    # Of a value that it is like, dtype and size alone are read.
                    like = has(user, Trait.MOVES, Trait.CASTS) and user.args[0] is not node
                    if not like and not has(user, Trait.METADATA):
                        blockers[user] = self._reason(user)
        return Stream(
            members=tuple(sorted(members)),
            entries=tuple(sorted(entries)),
            norms=tuple(norms[node] for node in sorted(norms)),
            outputs=tuple(sorted(outputs)),
            blockers=tuple(sorted(blockers.items())),
            is_residual=not members.isdisjoint(self._sums),
        )

    def _reason(self, user: Node) -> str:
        """Why a reader's result depends on the scale."""
        if user in self._reasons:
            return f"a norm on the stream is not understood: {self._reasons[user]}"
        if is_call(user, aten.layer_norm.default):
            return (
                "layer_norm reads the stream: it subtracts the mean, and only root-mean-square "
                "norms are rescaled"
            )
        if is_call(user, *GUARDS):
            return f"{op_name(user)} reads the stream: a guard against overflow, which has a limit"
        if is_call(user, aten.linear.default):
            return "linear reads the stream directly: the norm is on the stream, or there is none"
        return f"{op_name(user)} reads the stream, and is not the same at another scale"


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


RANKS = (2, 3)
"""Ranks of a residual stream that the op supports; a normalized rotary query has rank 4."""


def residual_stream(program: ExportedProgram) -> set[Node]:
    """The residual sums, and what is computed from them up to the next weighted sum: norms, scales,
    clamps, activations, and the casts between them.
    """
    stream = residual_sums(program)
    waiting = list(stream)
    while waiting:
        for user in waiting.pop().users:
            if user.op == "call_function" and is_float(user) and not has(user, Trait.HEAVY):
                waiting += [user] if user not in stream else []
                stream.add(user)
    return stream


def residual_sums(program: ExportedProgram) -> set[Node]:
    """Every sum of two values of one shape, one of them computed from the other by a layer."""
    weights = weight_expressions(program)
    sums = set()
    for node in program.graph.nodes:
        left, right = node.args[:2] if is_call(node, *SUMS) else (None, None)
        if not (is_float(left) and is_float(right)) or {left, right} & weights:
            continue
        assert isinstance(left, Node)
        assert isinstance(right, Node)
        if same_shape(shape_of(left), shape_of(right)) and (
            _is_layer(behind_casts(left), right) or _is_layer(behind_casts(right), left)
        ):
            sums.add(node)
    return sums


def _is_layer(start: Node, end: Node) -> bool:
    """Whether `end` is computed from `start` with a weighted sum on the way."""
    waiting, seen = [(end, False)], set()
    while waiting:
        node, weighted = waiting.pop()
        weighted = weighted or has(node, Trait.HEAVY)
        for source in node.all_input_nodes:
            if source is start and weighted:
                return True
            if source > start and (source, weighted) not in seen:
                seen.add((source, weighted))
                waiting.append((source, weighted))
    return False


@dataclass(frozen=True)
class Branch:
    """Values that scale with the weights of one linear."""

    members: tuple[Node, ...]
    """From the linear's result to the projection's input."""
    entries: tuple[tuple[Node, Node], ...]
    """(member, weight that is scaled for it) pairs."""


def find_branch(projection: Node, weights: set[Node]) -> Branch:
    """The branch that feeds a projection.

    Args:
        projection: a linear or matrix product whose weight is a weight expression.

    Raises:
        NoMatch: at the first op that does not commute with a factor.
    """
    return _branch(factors_of(projection)[0], projection, weights)


def factors_of(product: Node) -> tuple[Node, Node]:
    """The two factors of a linear or matrix product."""
    start = 1 if is_call(product, aten.addmm.default) else 0
    first, second = arguments(product)[start : start + 2]
    return first, second


def _branch(node: Node, reader: Node, weights: set[Node]) -> Branch:
    if real_users(node) != [reader]:
        raise NoMatch(node, f"{op_name(node)} is read elsewhere as well")
    own = foldable(node, weights)
    if own:
        return Branch((node,), tuple((node, source) for source in own))
    if is_call(node, aten.mul.Tensor) and not carried(node):
        inner = _either(node, weights)
    else:
        sources = carried(node)
        if len(sources) != 1 or is_call(node, *SUMS):
            raise NoMatch(node, f"no power of two passes through {op_name(node)}")
        inner = _branch(sources[0], node, weights)
    return Branch((*inner.members, node), inner.entries)


def _either(product: Node, weights: set[Node]) -> Branch:
    """The factor with the shorter branch: the other one holds the activation."""
    branches: list[Branch] = []
    misses: list[NoMatch] = []
    for source in dict.fromkeys(product.args[:2]):
        try:
            if isinstance(source, Node):
                branches.append(_branch(source, product, weights))
        except NoMatch as miss:
            misses.append(miss)
    if not branches:
        raise misses[0] if misses else NoMatch(product, "a value times a number that varies")
    return min(branches, key=lambda branch: len(branch.members))
