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

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import Node

from enginecast.passes.analyses.norms import is_statistic, normalized
from enginecast.passes.ir.edit import (
    arguments,
    aten,
    is_float,
    same_shape,
    shape_of,
    value,
    weight_expressions,
)
from enginecast.passes.ir.effects import mutated_values
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
    written = mutated_values(program.graph)
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
    if has(node, Trait.JOINS):
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
    if division or zeros or has(node, Trait.HOMOGENEOUS):
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
            found = normalized.match(mean)
            inner = _inner(found)
        except NoMatch as miss:
            square = arguments(mean)[0]
            self.reasons[square] = miss.reason
            self._seed(mean, square.args[0])
            return
        norm = Norm(found.node("plus"), found.number("epsilon"), inner)
        self.norms[found.node("square")] = self.norms[found.root] = norm
        self._seed(mean, found.node("measured"))

    def _add_fused(self, node: Node) -> None:
        _, sizes, _, epsilon = (*arguments(node), None, None)[:4]
        if len(sizes) == 1:
            # Without epsilon torch takes that of fp32, in which the program computes.
            self.norms[node] = Norm(node, 2.0**-23 if epsilon is None else float(epsilon))
        self._seed(node, node.args[0])

    def _seed(self, site: Node, source: object) -> None:
        if isinstance(source, Node):
            self.seeds.append((site, source))


def _inner(norm: Match) -> dict[Node, int]:
    """What scales inside a norm; NoMatch when something else reads it, too."""
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
    like_it = has(user, Trait.MOVES, Trait.CASTS) and user.args[0] is not node
    return like_it or has(user, Trait.METADATA)


RANKS = (2, 3)
"""Of a residual stream, and what the op takes; a rotated query that is normalised has 4."""


def residual_stream(program: ExportedProgram) -> set[Node]:
    """The residual sums, and what is computed from them up to the next weighted sum: norms, scales,
    clamps, activations, and the casts between them.
    """
    found = residual_sums(program)
    waiting = list(found)
    while waiting:
        for user in waiting.pop().users:
            if user.op == "call_function" and is_float(user) and not has(user, Trait.HEAVY):
                waiting += [user] if user not in found else []
                found.add(user)
    return found


def residual_sums(program: ExportedProgram) -> set[Node]:
    """Every sum of two values of one shape, one of them computed from the other by a layer."""
    weights = weight_expressions(program)
    places = {node: place for place, node in enumerate(program.graph.nodes)}
    return {
        node
        for node in program.graph.nodes
        if is_call(node, aten.add.Tensor)
        and any(_is_layer(*pair, places) for pair in _addends(node, weights))
    }


def _addends(total: Node, weights: set[Node]) -> Iterator[tuple[Node, Node]]:
    """Both orders of the addends, when a residual sum could be made of them."""
    left, right = total.args[:2]
    if not (isinstance(left, Node) and isinstance(right, Node)) or {left, right} & weights:
        return
    if not (is_float(left) and is_float(right)):
        return
    if same_shape(shape_of(left), shape_of(right)):
        yield behind_casts(left), right
        yield behind_casts(right), left


def _is_layer(start: Node, end: Node, places: dict[Node, int]) -> bool:
    """Whether `end` is computed from `start` with a weighted sum on the way."""
    between = _between(start, end, places)
    reached: set[Node] = {start}
    weighted: set[Node] = set()
    for node in sorted(between, key=places.__getitem__):
        sources = set(node.all_input_nodes)
        if sources & reached:
            reached.add(node)
            if has(node, Trait.HEAVY) or sources & weighted:
                weighted.add(node)
    return end in weighted


def _between(start: Node, end: Node, places: dict[Node, int]) -> set[Node]:
    """`end` and what it is computed from, no further back than `start`."""
    found, waiting = {end}, [end]
    while waiting:
        for source in waiting.pop().all_input_nodes:
            if source not in found and places[source] > places[start]:
                found.add(source)
                waiting.append(source)
    return found


@dataclass(frozen=True)
class Branch:
    """Values that a factor of the weights of one linear scales."""

    members: tuple[Node, ...]
    """From the linear to what the projection reads."""
    entries: tuple[tuple[Node, Node], ...]
    """(member, weight that is scaled for it)"""


def find_branch(projection: Node, weights: set[Node]) -> Branch:
    """The branch that feeds a projection.

    Args:
        projection: a linear or matrix product whose weight is a weight expression.
        weights: every weight expression of the program.

    Raises:
        NoMatch: at the op that no factor passes through.
    """
    source = projection.args[1 if is_call(projection, aten.addmm.default) else 0]
    assert isinstance(source, Node)
    return _branch(source, projection, weights)


def _branch(node: Node, reader: Node, weights: set[Node]) -> Branch:
    if real_users(node) != [reader]:
        raise NoMatch(node, f"{op_name(node)} is read elsewhere as well")
    own = foldable(node, weights)
    if own:
        return Branch((node,), tuple((node, source) for source in own))
    if is_call(node, aten.mul.Tensor) and not carried(node):
        return _onto(node, _either(node, weights))
    sources = carried(node)
    if len(sources) != 1 or is_call(node, *SUMS):
        raise NoMatch(node, f"no power of two passes through {op_name(node)}")
    return _onto(node, _branch(sources[0], node, weights))


def _either(product: Node, weights: set[Node]) -> Branch:
    """The shorter of the factors that are branches: the other one holds the activation."""
    found: list[Branch] = []
    misses: list[NoMatch] = []
    for source in dict.fromkeys(product.args[:2]):
        try:
            if isinstance(source, Node):
                found.append(_branch(source, product, weights))
        except NoMatch as miss:
            misses.append(miss)
    if not found:
        raise misses[0] if misses else NoMatch(product, "a value times a number that varies")
    return min(found, key=lambda branch: len(branch.members))


def _onto(node: Node, branch: Branch) -> Branch:
    return Branch((*branch.members, node), branch.entries)
