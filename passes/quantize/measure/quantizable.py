"""The layers of a program that a plan may quantize: ops that read a weight of their own."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import Graph, Node

from enginecast.passes.ir.edit import (
    arguments,
    aten,
    first_input,
    insert,
    same_shape,
    shape_of,
    value,
    weight_expressions,
    weight_specs,
)
from enginecast.passes.ir.match import is_call
from enginecast.passes.ir.quantization_plan import Kind, LayerPlan
from enginecast.passes.ir.source import layer_path, source_line
from enginecast.passes.ir.traits import Trait, has

RECURRENT: frozenset[Kind] = frozenset({"lstm", "gru", "rnn"})
_IN_ORDER = (
    *(aten.max_pool2d.default, aten.max_pool3d.default),
    *(aten.upsample_nearest1d.vec, aten.upsample_nearest2d.vec, aten.upsample_nearest3d.vec),
)
"""Ops that give elements of the first argument, picked by their order or place alone, and have
kernels of unsigned integers."""


@dataclass(frozen=True)
class Layer:
    """One of them."""

    node: Node
    kind: Kind
    weight: Node
    """The weight expression that the op reads."""
    name: str
    """Of the parameter; of several that are merged, of the first one."""
    module: str
    source: str
    ordinal: int
    constants: frozenset[Node] = frozenset()
    """Those of what it reads, beside its weight, that are weights, too."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the weight: [N, K], [rows, size] or [out, in, kernel...]."""
        found: Tensor = value(self.weight)
        return tuple(found.shape)

    @property
    def key(self) -> tuple[str, str, int]:
        """As in `QuantizationPlan.by_site`."""
        return (self.module, self.source, self.ordinal)


def find_layers(program: ExportedProgram) -> list[Layer]:
    """In graph order; those inside of blocks (cond, loops) are not among them."""
    weights = weight_expressions(program)
    specs = weight_specs(program)
    counts: Counter[tuple[str, str]] = Counter()
    layers = []
    for node in program.graph.nodes:
        kind = _kind_of(node)
        if kind is None or node in weights:
            continue
        matrices: Any = arguments(node)[2] if kind in RECURRENT else node.args[:2]
        weight = matrices[0 if kind in RECURRENT or kind == "embedding" else 1]
        if not weights.issuperset(matrices if kind in RECURRENT else [weight]):
            continue
        leaf = weight
        while leaf.op != "placeholder":
            leaf = leaf.all_input_nodes[0]
        module, source = layer_path(node), source_line(node)
        ordinal = counts[module, source]
        counts[module, source] += 1
        name = str(specs[leaf.name].target)
        constants = frozenset(weights.intersection(node.all_input_nodes))
        layers.append(Layer(node, kind, weight, name, module, source, ordinal, constants))
    return layers


def _kind_of(node: Node) -> Kind | None:
    """What a layer is; None where it is none."""
    if is_call(node, aten.linear.default):
        return "linear"
    if is_call(node, aten.embedding.default):
        return "embedding"
    if has(node, Trait.CONVOLVES):
        return "conv-transpose" if has(node, Trait.TRANSPOSED) else "conv"
    if has(node, Trait.RECURS):
        kinds: dict[object, Kind] = {aten.lstm.input: "lstm", aten.gru.input: "gru"}
        return kinds.get(node.target, "rnn")
    return None


@dataclass(frozen=True)
class Recurrence:
    """What an LSTM, GRU or RNN is made of."""

    steps: tuple[tuple[tuple[Any, ...], ...], ...]
    """Layer -> direction -> its weights: of the input, of the state, and perhaps biases of both."""
    has_biases: bool
    batch_first: bool
    has_projection: bool


def recurrence_of(node: Node, weights: Sequence[Any]) -> Recurrence:
    """Split the arguments of a recurrence.

    Args:
        weights: its weights in their order: nodes, or their values.
    """
    has_biases, layers, _, _, both_ways, batch_first = node.args[3:9]
    assert isinstance(layers, int)
    directions = 2 if both_ways else 1
    count = len(weights) // (layers * directions)
    each = [tuple(weights[at : at + count]) for at in range(0, len(weights), count)]
    steps = tuple(
        tuple(each[at : at + directions]) for at in range(0, layers * directions, directions)
    )
    whole = 4 if has_biases else 2
    return Recurrence(steps, bool(has_biases), bool(batch_first), count > whole)


def products_as_linears(program: ExportedProgram) -> int:
    """Make linears of products x @ W and b + x @ W whose W is a weight [K, N], in place.

    Returns:
        How many there were.
    """
    weights = weight_expressions(program)
    count = 0
    for node in list(program.graph.nodes):
        if node in weights or node.kwargs:  # factors alpha and beta
            continue
        bias: list[Node] = []
        if is_call(node, aten.addmm.default):
            addend, x, weight = arguments(node)
            bias = [addend]
            fits = addend in weights and shape_of(addend) == shape_of(weight)[1:]
        elif is_call(node, aten.mm.default, aten.matmul.default):
            x, weight = arguments(node)
            fits = len(shape_of(x)) > 1
        else:
            continue
        if not fits or weight not in weights or x in weights or len(shape_of(weight)) != 2:
            continue
        with program.graph.inserting_before(node):
            transposed = insert(program.graph, aten.t.default, (weight,), like=node)
        node.target, node.args = aten.linear.default, (x, transposed, *bias)
        count += 1
    return count


@dataclass(frozen=True)
class ConvGeometry:
    """How a convolution walks over what it reads."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    """Before each size, then behind each."""
    dilation: tuple[int, ...]
    groups: int


def geometry_of(node: Node) -> ConvGeometry:
    """Of a convolution, its defaults and the names of paddings written out."""
    kernel = shape_of(arguments(node)[1])[2:]
    given: tuple[Any, ...] = (*node.args[3:], *(None,) * 4)
    stride, padding, dilation, groups = given[:4]
    stride, dilation = (_each(found or 1, len(kernel)) for found in (stride, dilation))
    if isinstance(padding, str):
        whole = [
            d * (k - 1) if padding == "same" else 0 for d, k in zip(dilation, kernel, strict=True)
        ]
        pads = (*(size // 2 for size in whole), *(size - size // 2 for size in whole))
    else:
        pads = _each(padding or 0, len(kernel)) * 2
    return ConvGeometry(stride, pads, dilation, groups or 1)


@dataclass(frozen=True)
class TransposedGeometry:
    """How a transposed convolution is one of what it reads, whose results are interleaved.

    With a stride of s, what stands s apart in the result is made of the same places of the input:
    s results at a time are the channels of one convolution with a stride of 1, under a kernel of
    `taps` places.

        y[s * i + r] = sum over j of x[i - j] * w[s * j + r]        r = 0 .. s - 1
    """

    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    taps: tuple[int, ...]
    padding: tuple[int, ...]
    """Of the convolution: before each size, then behind each."""
    cropped: tuple[tuple[int, int], ...]
    """Of each size of what is interleaved: how much is left out at its start and at its end."""


def transposed_geometry_of(node: Node) -> TransposedGeometry:
    """Of a transposed convolution, its defaults written out.  A padding below zero says that it
    cannot be said so.
    """
    kernel = shape_of(arguments(node)[1])[2:]
    given: tuple[Any, ...] = (*node.args[3:], *(None,) * 5)
    stride, padding, behind, groups, dilation = given[:5]
    count = len(kernel)
    strides, dilations = (_each(sizes or 1, count) for sizes in (stride, dilation))
    paddings, more = (_each(sizes or 0, count) for sizes in (padding, behind))
    taps, before, after, cropped = [], [], [], []
    for s, p, b, k, d in zip(strides, paddings, more, kernel, dilations, strict=True):
        reach = d * (k - 1) + 1
        taps.append(-(-reach // s))
        before.append(taps[-1] - 1 - p // s)
        after.append((reach - 1 - p + b) // s)
        whole = s * (before[-1] + after[-1] - taps[-1] + 2)  # beside s * (size - 1)
        start = p % s
        cropped.append((start, whole - start - (reach - 2 * p + b)))
    return TransposedGeometry(
        *(strides, dilations, groups or 1, tuple(taps), (*before, *after), tuple(cropped))
    )


def channels_first(weight: Tensor, groups: int) -> Tensor:
    """The weight of a transposed convolution, [in, out / groups, kernel...], with a row for each
    channel that it gives: [out, in / groups, kernel...].
    """
    whole: Tensor = weight.unflatten(0, (groups, -1))
    return whole.transpose(1, 2).flatten(0, 1)


def _each(given: Any, count: int) -> tuple[int, ...]:
    sizes = tuple(given) if isinstance(given, list | tuple) else (given,)
    return sizes * count if len(sizes) == 1 else sizes


@dataclass(frozen=True)
class Tail:
    """What a layer gives, behind a clamp that it alone feeds."""

    node: Node
    low: float | None = None
    high: float | None = None

    def clamped(self, tensor: Tensor) -> Tensor:
        """What is left of a value that the layer gives."""
        if self.low is None and self.high is None:
            return tensor
        return tensor.clamp(self.low, self.high)


def tail_of(node: Node) -> Tail:
    """The rectifier or clamp behind a node that nothing else reads; else the node itself."""
    if len(node.users) != 1:
        return Tail(node)
    [user] = node.users
    if is_call(user, aten.relu.default, aten.relu_.default):
        return Tail(user, 0.0)
    if is_call(user, aten.relu6.default):
        return Tail(user, 0.0, 6.0)
    defaults = (-1.0, 1.0) if is_call(user, aten.hardtanh.default) else (None, None)
    limits = (*user.args[1:3], *defaults[len(user.args) - 1 :])
    clamps = is_call(user, aten.hardtanh.default, aten.clamp.default, aten.clamp_min.default)
    if not clamps or user.kwargs or user.args[0] is not node:
        return Tail(node)
    if any(isinstance(limit, Node) for limit in limits):
        return Tail(node)
    low, high = (float(n) if isinstance(n, int | float) else None for n in limits)
    return Tail(user, low, high)


def origin_in_order(node: Node) -> Node:
    """The value that the elements of a node are taken from, by ops that commute with rounding."""
    while True:
        moves = has(node, Trait.MOVES) or is_call(node, *_IN_ORDER)
        if not moves or not node.args or not isinstance(source := node.args[0], Node):
            return node
        if not isinstance(value(source), Tensor) or not isinstance(value(node), Tensor):
            return node
        node = source


def feeds_convolution(node: Node) -> bool:
    """Whether a convolution reads what a node gives, or elements of it in their order."""
    for user in node.users:
        if has(user, Trait.CONVOLVES) and user.args[0] is node:
            return True
        if origin_in_order(user) is not user and feeds_convolution(user):
            return True
    return False


def is_product_of_integers(plan: LayerPlan) -> bool:
    """Whether a layer is a convolution of unsigned values, which gives some, too."""
    return is_static_conv(plan) and not plan.signed


def is_static_conv(plan: LayerPlan) -> bool:
    """Whether a layer is a convolution that multiplies integers, signed or not."""
    return plan.kind.startswith("conv") and plan.choice == "w8a8-static"


@dataclass(frozen=True)
class IntegerValue:
    """A value that is held in unsigned integers wherever it is read."""

    made_by: Node
    """The convolution or sum."""
    by_channel: bool
    """Whether each channel has a scale of its own: what reads the value, reads floats."""


def integer_values(graph: Graph, plans: Mapping[Node, LayerPlan]) -> dict[Node, IntegerValue]:
    """The tail of each convolution in int8; and that of a sum which such a convolution reads, if it
    is of such values, or of one and what such a convolution reads.

    Returns:
        By tail, in graph order.
    """
    convs = {node for node, plan in plans.items() if is_product_of_integers(plan)}
    read = {origin_in_order(first_input(node)) for node in convs}
    read |= {origin for origins in joined_integers(plans).values() for origin in origins}
    found: dict[Node, Node] = {}
    for node in graph.nodes:
        if node in convs:
            found[tail_of(node).node] = node
        elif is_call(node, aten.add.Tensor) and not node.kwargs and len(node.args) == 2:
            tail, shape = tail_of(node).node, shape_of(node)
            sides = [s for s in node.args if isinstance(s, Node) and same_shape(shape_of(s), shape)]
            origins = [origin_in_order(side) for side in sides]
            known = [origin for origin in origins if origin in found]
            adds = len(sides) == 2 and known and all(o in known or o in read for o in origins)
            if tail in read and adds:
                found[tail] = node
    sums = (node for node in found.values() if node not in convs)
    read |= {origin_in_order(side) for node in sums for side in node.all_input_nodes}
    return {
        tail: IntegerValue(node, tail not in read and tail_of(node).low in (None, 0.0))
        for tail, node in found.items()
    }


def joined_integers(plans: Mapping[Node, LayerPlan]) -> dict[Node, list[Node]]:
    """The concatenations that convolutions in int8 read and whose parts, one at least of such a
    convolution, are integers of one scale.

    Returns:
        Where the parts of each are taken from.
    """
    convs = {node for node, plan in plans.items() if is_product_of_integers(plan)}
    tails = {tail_of(node).node for node in convs}
    open_ = [origin_in_order(first_input(node)) for node in plans if node in convs]
    joined: dict[Node, list[Node]] = {}
    while open_:
        node = open_.pop()
        if node in joined or not is_call(node, aten.cat.default, aten.concat.default):
            continue
        origins = [origin_in_order(part) for part in arguments(node)[0]]
        if tails.intersection(origins) or any(is_call(o, aten.cat.default) for o in origins):
            joined[node] = origins
            open_ += origins
    return joined


def spans_wanted(graph: Graph, plans: Mapping[Node, LayerPlan]) -> dict[Node, bool]:
    """The values whose least and largest elements decide the scales of convolutions in int8; and
    whether they are wanted of each channel.
    """
    read = (node for node, plan in plans.items() if is_product_of_integers(plan))
    by_channel = {origin_in_order(first_input(node)): False for node in read}
    for origins in joined_integers(plans).values():
        by_channel |= dict.fromkeys(origins, False)
    return by_channel | {
        tail: held.by_channel for tail, held in integer_values(graph, plans).items()
    }
