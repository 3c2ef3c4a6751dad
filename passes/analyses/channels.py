"""Find which linears read the channels of a value, and which weights upstream can absorb a scale
for each channel.

    norm:       %x = rms_norm(%h, %w)                      %w (of a LayerNorm, and its bias)
    linear:     %x = linear(%h, %w, %b)                    the rows of %w, and %b
    gate:       %x = gelu(linear(%h, ..)) * linear(%h, %w) the rows of %w
    relu:       %x = relu(linear(%h, %w))                  the rows of %w
    attention:  %x = attention(%q, %k, linear(%h, %w))     the rows of %w

Attention mixes tokens and not channels, so a factor on a channel of its values is a factor on its
result. If query heads share a key-value head, their channels share a factor.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import Node
from torch.utils._pytree import tree_leaves

from enginecast.passes.analyses.attention import swaps_heads_and_tokens, unrepeated
from enginecast.passes.ir.edit import (
    arguments,
    aten,
    dtype_of,
    first_input,
    is_float,
    same_size,
    shape_of,
    value,
)
from enginecast.passes.ir.match import (
    NoMatch,
    is_call,
    is_float_cast,
    op_name,
    real_users,
    scalar_operand,
)
from enginecast.passes.ir.text import dtype_text
from enginecast.passes.ir.traits import Trait, has


@dataclass(frozen=True)
class Layout:
    """How a value's channels map to the channels that the linears read, [..., channels]."""

    kind: Literal["flat", "split", "heads"]
    """[..., heads * size], [..., heads, size] or [..., heads, tokens, size]."""
    heads: int
    size: int
    repeats: int = 1
    """Number of heads read by the linears per head of this value."""

    def spread(self, exponents: Tensor) -> Tensor:
        """The channels' exponents in this value's layout, broadcastable to it."""
        own = exponents.view(self.heads, self.repeats, self.size)[:, 0]
        if self.kind == "flat":
            return own.reshape(-1)
        return own.unsqueeze(1) if self.kind == "heads" else own

    def tied(self, sizes: Tensor) -> Tensor:
        """For each channel, the largest magnitude over the channels that share its factor."""
        groups = sizes.view(self.heads, self.repeats, self.size)
        return groups.amax(1, keepdim=True).expand_as(groups).reshape(-1)


EXACT = frozenset({torch.float32, torch.bfloat16, torch.float64})
"""Dtypes in which scaling by powers of two is exact within fp32's range; fp16 gets subnormal below
6e-5."""
_SPLITS = (aten.split_with_sizes.default, aten.split.Tensor, aten.chunk.default)


@dataclass(frozen=True)
class Fold:
    """The weights that are scaled."""

    node: Node
    """The norm, linear or product that reads them."""
    places: tuple[tuple[int, bool], ...]
    """(argument, whether it is a matrix whose rows are the channels)."""
    start: int
    """Index of the first channel among the node's `total`: a merged linear has other channels,
    too."""
    total: int

    def spread(self, exponents: Tensor) -> Tensor:
        """Exponents of all of the node's channels; 0 for the other channels."""
        whole = torch.zeros(self.total, dtype=exponents.dtype)
        whole[self.start : self.start + len(exponents)] = exponents
        return whole


@dataclass(frozen=True)
class Source:
    """Where a value comes from: the weights that can scale its channels, and what is between."""

    fold: Fold
    layout: Layout
    """Layout of the result of the fold's node."""
    members: tuple[tuple[Node, Layout], ...]
    """The values that are scaled with it."""


def find_source(root: Node, weights: set[Node]) -> Source:
    """Find the weights in which the channels of a value can be scaled.

    Args:
        root: the value, [..., channels].

    Raises:
        NoMatch: at the first op that does not commute with a channel factor.
    """
    return _Walk(weights).at(root, Layout("flat", 1, shape_of(root)[-1]))


class _Walk:
    """Walks from a value back to the weights."""

    def __init__(self, weights: set[Node]) -> None:
        self._weights = weights

    def at(self, node: Node, layout: Layout) -> Source:
        if node.op != "call_function":
            raise NoMatch(node, f"no weight makes it: it is a {node.op}")
        if dtype_of(node) not in EXACT:
            found = dtype_text(dtype_of(node))
            raise NoMatch(
                node, f"it is {found}: scaling is exact in f32 and bf16, so scale before the cast"
            )
        fold = self._fold(node) if layout.kind == "flat" else None
        if fold is not None:
            return Source(fold, layout, ((node, layout),))
        if is_call(node, aten.mul.Tensor) and scalar_operand(node, aten.mul.Tensor) is None:
            found_source = self._either(node, layout)
        else:
            found_source = self._on(*self._step(node, layout), node)
        return replace(found_source, members=(*found_source.members, (node, layout)))

    def _on(self, source: Node, layout: Layout, reader: Node) -> Source:
        """Continue at the input of `reader`, unless something else reads it, too."""
        while source not in reader.all_input_nodes:  # repeating heads takes several nodes
            inner = first_input(reader)
            if real_users(inner) != [reader]:
                raise NoMatch(inner, f"{op_name(inner)} is read elsewhere as well")
            reader = inner
        given = [a for a in tree_leaves((reader.args, reader.kwargs)) if a is source]
        if real_users(source) != [reader] or len(given) != 1:
            raise NoMatch(source, f"{op_name(source)} is read elsewhere as well")
        return self.at(source, layout)

    def _either(self, product: Node, layout: Layout) -> Source:
        """The scalable factor with the shorter path: the other one holds the activation."""
        sources: list[Source] = []
        misses: list[NoMatch] = []
        for side in product.args[:2]:
            if not isinstance(side, Node) or not same_size(shape_of(side)[-1], layout.size):
                raise NoMatch(product, "a product that broadcasts over the channels")
            try:
                sources.append(self._on(side, layout, product))
            except NoMatch as miss:
                misses.append(miss)
        if not sources:
            raise misses[-1]
        return min(sources, key=lambda source: len(source.members))

    def _fold(self, node: Node) -> Fold | None:
        """The weights in which the channels of a node's result can be scaled."""
        if is_call(node, aten.rms_norm.default, aten.layer_norm.default):
            return self._norm(node, node)
        if is_call(node, aten.linear.default):
            return self._linear(node)
        if is_call(node, aten.mul.Tensor):
            # With one weight per channel, as at the end of a decomposed norm.
            places = [p for p in (0, 1) if node.args[p] in self._weights]
            if len(places) != 1:
                return None
            weight, channels = arguments(node)[places[0]], shape_of(node)[-1]
            if value(weight).numel() != channels or shape_of(weight)[-1] != channels:
                return None
            return Fold(node, ((places[0], False),), 0, channels)
        if "getitem" not in op_name(node):
            return None
        source, index = arguments(node)
        if index == 0 and is_call(source, torch.ops.enginecast.skip_rms_norm.default):
            return self._norm(source, node)
        if not is_call(source, *_SPLITS):
            return None
        # One of the linears that were merged into one.
        linear = first_input(source)
        sizes = [part.shape[-1] for part in value(source)]
        if not is_call(linear, aten.linear.default) or sum(sizes) != shape_of(linear)[-1]:
            return None
        if real_users(linear) != [source]:
            raise NoMatch(linear, f"{op_name(linear)} is read elsewhere as well")
        return replace(self._linear(linear), start=sum(sizes[:index]))

    def _norm(self, norm: Node, result: Node) -> Fold:
        sizes = norm.args[1]
        if isinstance(sizes, list | tuple) and len(sizes) != 1:
            raise NoMatch(norm, f"the norm is over {len(sizes)} dims, expected the last one")
        positions = (2, 3) if is_call(norm, aten.layer_norm.default) else (2,)
        given = [p for p in positions if len(norm.args) > p and norm.args[p] is not None]
        if 2 not in given:
            raise NoMatch(norm, "the norm has no weight to scale")
        if any(norm.args[p] not in self._weights for p in given):
            raise NoMatch(norm, "the norm's weight is computed from inputs")
        return Fold(norm, tuple((p, False) for p in given), 0, shape_of(result)[-1])

    def _linear(self, node: Node) -> Fold:
        given = [source for source in arguments(node)[1:] if source is not None]
        if not self._weights.issuperset(given):
            raise NoMatch(node, "the linear's weight is computed from inputs")
        places = ((1, True), (2, False))[: len(given)]
        return Fold(node, places, 0, shape_of(node)[-1])

    def _step(self, node: Node, layout: Layout) -> tuple[Node, Layout]:
        """The input that `node` maps channel by channel."""
        scaled = scalar_operand(node, aten.mul.Tensor)
        if scaled is not None:
            return scaled[0], layout
        args = arguments(node)
        if has(node, Trait.IDENTITY) or is_call(node, aten.relu.default):
            return args[0], layout
        reshapes = has(node, Trait.RESHAPES)
        before, after = (shape_of(args[0]), shape_of(node)) if reshapes else ((), ())
        # A view that joins or splits the last of [batch, tokens, ...].
        views = reshapes and all(map(same_size, before[:2], after[:2]))
        step: tuple[Node, Layout] | None = None
        if layout.kind == "flat" and layout.heads == 1:
            if is_call(node, torch.ops.enginecast.attention.default):
                _, _, values, _, heads, shared, *_ = args
                step = values, Layout("flat", shared, layout.size // heads, heads // shared)
            elif views and len(before) == 4 and len(after) == 3:
                step = args[0], Layout("split", before[2], before[3])
        elif layout.kind == "split":
            if swaps_heads_and_tokens(node):
                step = args[0], replace(layout, kind="heads")
            elif views and len(before) == 3:
                step = args[0], replace(layout, kind="flat")
        elif layout.kind == "heads":
            if swaps_heads_and_tokens(node):
                step = args[0], replace(layout, kind="split")
            elif is_call(node, *_VALUE_OF):
                step = _shared(args[_VALUE_OF[node.target]], layout)
            elif is_call(node, aten.cat.default):
                # The one value of a join whose others have no elements: a cache that is empty.
                full = [each for each in args[0] if value(each).shape != (0,)]
                step = (full[0], layout) if len(full) == 1 else None
            elif (source := unrepeated(node)) is not node:
                step = _shared(source, layout)
        if step is None:
            raise NoMatch(node, f"no factor of a channel passes through {op_name(node)}")
        return step


_VALUE_OF: dict[Any, int] = {
    torch.ops.enginecast.attention.default: 2,
    aten.scaled_dot_product_attention.default: 2,
    aten.matmul.default: 1,
}
"""Op -> index of the argument whose channels the result keeps."""


def _shared(values: Node, layout: Layout) -> tuple[Node, Layout] | None:
    """Number of value heads, each of which serves one or more heads of the result."""
    if len(shape_of(values)) != 4:
        return None
    heads = shape_of(values)[1]
    return values, Layout("heads", heads, layout.size, layout.repeats * (layout.heads // heads))


@dataclass(frozen=True)
class Readers:
    """The readers of a value [..., channels]."""

    linears: tuple[Node, ...]
    members: tuple[Node, ...]
    """The value in its other shapes, channels last."""


def find_roots(program: ExportedProgram, weights: set[Node]) -> list[Node]:
    """Each value that linears with a stored weight read, before reshapes."""
    roots: dict[Node, None] = {}
    for node in program.graph.nodes:
        if is_call(node, aten.linear.default) and node.args[1] in weights and node not in weights:
            root = first_input(node)
            while _keeps_channels(root):
                root = first_input(root)
            roots[root] = None
    return sorted(roots)


def find_readers(root: Node, weights: set[Node]) -> Readers:
    """Find the readers of a value.

    Raises:
        NoMatch: something other than a linear reads it.
    """
    linears: list[Node] = []
    members: list[Node] = []
    waiting = [root]
    while waiting:
        node = waiting.pop()
        for user in real_users(node):
            if user.op != "output" and not isinstance(value(user), Tensor | tuple | list):
                continue  # it reads sizes
            given = [argument for argument in tree_leaves(user.args) if argument is node]
            is_linear = is_call(user, aten.linear.default) and user.args[1] in weights
            if is_linear and user.args[0] is node and len(given) == 1:
                linears.append(user)
            elif _keeps_channels(user) and user.args[0] is node:
                members.append(user)
                waiting.append(user)
            elif user.op == "output":
                raise NoMatch(node, "it is an output of the program, too")
            else:
                raise NoMatch(user, f"{op_name(user)} reads it, too")
    return Readers(tuple(sorted(linears)), tuple(sorted(members)))


def _keeps_channels(node: Node) -> bool:
    """Whether a node passes its first argument on with an unchanged last dim."""
    if node.op != "call_function" or not node.args or not isinstance(node.args[0], Node):
        return False
    source = node.args[0]
    if not all(isinstance(value(n), Tensor) and is_float(n) for n in (node, source)):
        return False
    if not same_size(shape_of(node)[-1:], shape_of(source)[-1:]):
        return False
    if has(node, Trait.IDENTITY, Trait.RESHAPES) or is_float_cast(node):
        return True
    if is_call(node, aten.expand.default):
        return True
    args, rank = arguments(node), len(shape_of(source))
    if is_call(node, aten.permute.default):
        return bool(args[1][-1] % rank == rank - 1)
    if is_call(node, aten.transpose.int):
        return all(dim % rank != rank - 1 for dim in args[1:3])
    return is_call(node, aten.select.int, aten.slice.Tensor) and args[1] % rank != rank - 1
