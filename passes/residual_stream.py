"""Find the residual streams of a program: what adds up to a value that norms read.

A stream is a set of values that only scale together: sums, and what carries them on (views, casts,
dropout, cuts, joins).  It is written where a linear, an embedding or a product with a weight comes
in, whose weights can be scaled instead, or where any other value does.  It is read by norms and
outputs; whatever else reads it *blocks* it, because its result would not be the same at another
scale.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import Node

from enginecast.passes.dtype_ops import JOINS, SHAPE_ONLY
from enginecast.passes.fuse_rms_norm import Normalised, is_statistic, normalised
from enginecast.passes.graph_edit import arguments, aten, is_float, value
from enginecast.passes.match import (
    CASTS,
    INERT,
    NoMatch,
    is_call,
    op_name,
    real_users,
    scalar_operand,
)
from enginecast.passes.written import written_values

SUMS = frozenset({aten.add.Tensor, aten.sub.Tensor})
LINEAR_IN_FIRST: frozenset[Any] = frozenset(
    {
        *SHAPE_ONLY,
        *CASTS,
        *INERT,
        aten.mean.dim,
        aten.sum.dim_IntList,
        aten.index.Tensor,
        aten.index_select.default,
        aten.relu.default,
    }
)
"""A positive factor of the first argument is one of the result."""
TYPE_READERS = frozenset(
    {aten.zeros_like.default, aten.ones_like.default, aten.full_like.default}
    | {aten.new_zeros.default, aten.new_ones.default, aten.new_full.default}
)
LIKE_SECOND = frozenset({aten.expand_as.default, aten.type_as.default, aten.to.other})
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
"""Op -> arguments that scale its result when all of them are scaled."""
GUARDS = frozenset({aten.isinf.default, aten.isfinite.default, aten.clamp.default})


@dataclass(frozen=True)
class Norm:
    """A root-mean-square norm that reads a stream."""

    node: Node
    """What adds epsilon, or an aten.rms_norm."""
    epsilon: float
    inner: dict[Node, int] = field(default_factory=dict)
    """Values inside that scale with the stream: how many times its exponent."""


@dataclass(frozen=True)
class Stream:
    """Values that scale together."""

    members: tuple[Node, ...]
    entries: tuple[tuple[Node, Node], ...]
    """(member, source): what comes in from outside and has to be scaled for that member; a weight,
    or a value."""
    norms: tuple[Norm, ...]
    outputs: tuple[Node, ...]
    """Members that the program returns."""
    blockers: tuple[tuple[Node, str], ...]
    """Readers that are not the same at another scale, and why."""

    @property
    def is_residual(self) -> bool:
        """Whether anything is added up in it."""
        return any(is_call(node, *SUMS) for node in self.members)


def find_streams(program: ExportedProgram, weights: set[Node]) -> Iterator[tuple[Node, Stream]]:
    """Every stream, with the first norm that reads it, in graph order.

    Args:
        program: before its norms are fused, or after.
        weights: every weight expression of the program.
    """
    readers = _Readers(program)
    written = written_values(program.graph)
    seen: set[Node] = set()
    for site, seed in readers.seeds:
        if seed in seen or not _can_carry(seed, weights, written):
            continue
        stream = _Growth(weights, readers, written).grow(seed)
        seen.update(stream.members)
        yield site, stream


def foldable(node: Node, weights: set[Node]) -> tuple[Node, ...]:
    """The weight expressions by which the result of `node` can be scaled; empty when there are
    none.
    """
    if is_call(node, aten.mul.Tensor):
        found = tuple(a for a in node.args[:2] if isinstance(a, Node) and a in weights)
        return found if len(found) == 1 else ()
    positions = WEIGHTED.get(node.target)
    if positions is None:
        return ()
    given = [node.args[p] for p in positions if p < len(node.args)]
    given = [argument for argument in given if argument is not None]
    if not all(isinstance(argument, Node) and argument in weights for argument in given):
        return ()
    return tuple(argument for argument in given if isinstance(argument, Node))


def carried(node: Node) -> tuple[Node, ...]:
    """The arguments that `node` hands on: scaled alike, they give a result scaled alike."""
    if is_call(node, *SUMS):
        operands = node.args[:2]
        return tuple(a for a in operands if isinstance(a, Node)) if _all_nodes(operands) else ()
    if is_call(node, *JOINS):
        joined = arguments(node)[0]
        return tuple(joined)
    if is_call(node, aten.where.self):
        chosen = node.args[1:3]
        return tuple(a for a in chosen if isinstance(a, Node)) if _all_nodes(chosen) else ()
    if is_call(node, aten.mul.Tensor):
        split = scalar_operand(node, aten.mul.Tensor)
        return (split[0],) if split is not None else ()
    division = is_call(node, aten.div.Tensor) and not isinstance(node.args[1], Node)
    zeros = is_call(node, aten.masked_fill.Scalar) and node.args[2] == 0
    if division or zeros or is_call(node, *LINEAR_IN_FIRST):
        source = node.args[0]
        return (source,) if isinstance(source, Node) and is_float(source) else ()
    return ()


def _all_nodes(operands: Sequence[object]) -> bool:
    return all(isinstance(operand, Node) for operand in operands)


def _can_carry(node: Node, weights: set[Node], written: set[Node]) -> bool:
    if node in weights or node in written or node.op != "call_function":
        return False
    return bool(carried(node) or foldable(node, weights))


class _Readers:
    """The norms of a program, by the nodes through which they read."""

    def __init__(self, program: ExportedProgram) -> None:
        self.norms: dict[Node, Norm] = {}
        self.reasons: dict[Node, str] = {}
        self.seeds: list[tuple[Node, Node]] = []
        """(where a norm stands, what it reads)"""
        for node in program.graph.nodes:
            if is_statistic(node):
                self._add_spelled(node)
            elif is_call(node, aten.rms_norm.default):
                self._add_fused(node)
            elif is_call(node, aten.layer_norm.default):
                self._seed(node, node.args[0])

    def _add_spelled(self, mean: Node) -> None:
        try:
            found = normalised(mean)
            inner = _inner(found)
        except NoMatch as miss:
            square = arguments(mean)[0]
            self.reasons[square] = miss.reason
            self._seed(mean, square.args[0])
            return
        norm = Norm(found.plus, found.epsilon, inner)
        self.norms[found.square] = self.norms[found.scaled] = norm
        self._seed(mean, found.measured)

    def _add_fused(self, node: Node) -> None:
        _, sizes, _, epsilon = (*arguments(node), None, None)[:4]
        if len(sizes) == 1:
            # Without epsilon torch takes that of fp32, in which the program computes.
            self.norms[node] = Norm(node, 2.0**-23 if epsilon is None else float(epsilon))
        self._seed(node, node.args[0])

    def _seed(self, site: Node, source: object) -> None:
        if isinstance(source, Node):
            self.seeds.append((site, source))


def _inner(found: Normalised) -> dict[Node, int]:
    """What scales inside a norm; NoMatch when something else reads it, too."""
    is_reciprocal = is_call(found.root, aten.rsqrt.default)
    inner = {found.square: 2, found.mean: 2, found.plus: 2, found.root: -1 if is_reciprocal else 1}
    for node in list(inner):
        users = real_users(node)
        if len(users) != 1:
            raise NoMatch(node, f"{op_name(node)} in a norm has {len(users)} readers")
        if is_call(users[0], aten.reciprocal.default):
            inner[users[0]] = -1
    return inner


class _Growth:
    """Collects one stream from one of its values."""

    def __init__(self, weights: set[Node], readers: _Readers, written: set[Node]) -> None:
        self._weights = weights
        self._readers = readers
        self._written = written
        self._members: dict[Node, None] = {}
        self._entries: list[tuple[Node, Node]] = []
        self._norms: dict[Node, Norm] = {}
        self._outputs: dict[Node, None] = {}
        self._blockers: dict[Node, str] = {}

    def grow(self, seed: Node) -> Stream:
        """The stream that `seed` is part of."""
        waiting = [seed]
        while waiting:
            node = waiting.pop()
            if node in self._members:
                continue
            self._members[node] = None
            waiting += [*self._sources(node), *self._readers_of(node)]
        return Stream(
            members=tuple(sorted(self._members)),
            entries=tuple(sorted(self._entries)),
            norms=tuple(self._norms[node] for node in sorted(self._norms)),
            outputs=tuple(sorted(self._outputs)),
            blockers=tuple((node, self._blockers[node]) for node in sorted(self._blockers)),
        )

    def _sources(self, node: Node) -> Iterator[Node]:
        """What has to be scaled for this member: other members, or entries."""
        own = foldable(node, self._weights)
        for source in dict.fromkeys(own or carried(node)):
            if not own and _can_carry(source, self._weights, self._written):
                yield source
            else:
                self._entries.append((node, source))

    def _readers_of(self, node: Node) -> Iterator[Node]:
        for user in real_users(node):
            if user.op == "output":
                self._outputs[node] = None
            elif user in self._readers.norms:
                norm = self._readers.norms[user]
                self._norms[norm.node] = norm
            elif node in carried(user) and user not in self._written:
                yield user
            elif not _reads_type(user, node):
                self._blockers[user] = self._reason(user)

    def _reason(self, user: Node) -> str:
        known = self._readers.reasons.get(user)
        if known is not None:
            return f"a norm on the stream is not understood: {known}"
        if is_call(user, aten.layer_norm.default):
            return (
                "layer_norm reads the stream: it subtracts the mean, and only root-mean-square "
                "norms are rescaled"
            )
        if user in self._written:
            return "a value of the stream is written in place"
        if is_call(user, *GUARDS):
            return f"{op_name(user)} reads the stream: a guard against overflow, which has a limit"
        if is_call(user, aten.linear.default):
            return "linear reads the stream itself: a norm stands on the stream, or there is none"
        return f"{op_name(user)} reads the stream, and is not the same at another scale"


def _reads_type(user: Node, node: Node) -> bool:
    """Whether a reader looks at size or dtype alone."""
    if not isinstance(value(user), Tensor | tuple | list):
        return True
    return is_call(user, *TYPE_READERS) or (
        is_call(user, *LIKE_SECOND) and user.args[0] is not node
    )
