"""What linears read, quantised once for all that read one value.

    %norm = aten.rms_norm(...)
    %s: f32[2, 7, 1] = enginecast.dynamic_scale(%norm, fp8, True)     right after the producer, so
    %q: fp8[2, 7, 64] = enginecast.quantize(%norm, %s, fp8)           that a backend can fuse them
    %a = enginecast.quantized_linear(%q, %s, ...)
    %b = enginecast.quantized_linear(%q, %s, ...)

Linears that read views of one value (x and x.view(-1, 64)) share it, too: the quantised values and
their scales are viewed in its place.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import Node

from enginecast.ops.quantize import LIMITS, SMALLEST_SCALE
from enginecast.passes.ir.edit import (
    SCALE,
    add_weight,
    aten,
    first_input,
    free_name,
    insert,
    same_size,
    shape_of,
)
from enginecast.passes.ir.effects import own
from enginecast.passes.ir.match import is_call, is_inert, last_dim
from enginecast.passes.ir.quantization_plan import Scaling
from enginecast.passes.quantize.measure.quantizable import Layer
from enginecast.passes.quantize.weights import ScaleDtype, rounded_up

_RESHAPES = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)


@dataclass(frozen=True)
class _Wanted:
    """What several linears can share."""

    origin: Node
    """The value before views of it."""
    scaling: Scaling
    static: bool


class Activations:
    """Quantises what the chosen linears read.

    Args:
        dtype: of the quantised values.
        layers: each linear with what shares one scale in what it reads, and whether that is known
            beforehand.
        ranges: max |x| of each origin whose scale is known beforehand.
        scale_dtype: what holds such a scale exactly.
    """

    def __init__(
        self,
        program: ExportedProgram,
        dtype: torch.dtype,
        layers: Iterable[tuple[Layer, Scaling, bool]],
        ranges: Mapping[Node, float],
        scale_dtype: ScaleDtype = "fp32",
    ) -> None:
        self._program = program
        self._scale_dtype = scale_dtype
        self._dtype = dtype
        self._ranges = ranges
        self._wanted: dict[Node, _Wanted] = {}
        self._read: dict[_Wanted, set[Node]] = defaultdict(set)
        self._made: dict[_Wanted, tuple[Node, Node, Node]] = {}
        for layer, scaling, static in layers:
            wanted = _Wanted(origin(layer), scaling, static)
            self._wanted[layer.node] = wanted
            self._read[wanted].add(first_input(layer.node))

    def of(self, layer: Layer) -> tuple[Node, Node]:
        """Quantised values and scale of what a linear reads."""
        wanted = self._wanted[layer.node]
        if wanted not in self._made:
            self._made[wanted] = self._make(wanted, layer)
        values, scale, source = self._made[wanted]
        chain = _views(first_input(layer.node), source)
        with self._program.graph.inserting_before(layer.node):
            for view in chain:
                values = self._insert(view.target, (values, *view.args[1:]), layer)
                if shape_of(scale):
                    scale = self._insert(view.target, (scale, *_of_scale(view)), layer)
        return values, scale

    def _make(self, wanted: _Wanted, layer: Layer) -> tuple[Node, Node, Node]:
        """Values, scale, and what they were made of."""
        read = self._read[wanted]
        source = wanted.origin if len(read) > 1 else next(iter(read))
        graph = self._program.graph
        known = self._constant(wanted, layer) if wanted.static else None
        with graph.inserting_before(_after(source)):
            by_row = wanted.scaling == "row"
            scale = known or self._insert(
                own.dynamic_scale.default, (source, self._dtype, by_row), layer
            )
            values = self._insert(own.quantize.default, (source, scale, self._dtype), layer)
        return values, scale, source

    def _constant(self, wanted: _Wanted, layer: Layer) -> Node:
        largest = self._ranges[wanted.origin]
        scale = max(largest / LIMITS[self._dtype], SMALLEST_SCALE)
        name = free_name(self._program, f"{layer.module or 'model'}.input_scale")
        tensor = rounded_up(torch.tensor(scale, dtype=torch.float32), self._scale_dtype)
        return add_weight(self._program, name, tensor, InputKind.CONSTANT_TENSOR)

    def _insert(self, target: object, args: tuple[object, ...], layer: Layer) -> Node:
        assert callable(target)
        node = insert(self._program.graph, target, args, like=layer.node)
        node.meta.pop(SCALE, None)  # a scale carries the power of two, if there is one
        return node


def origin(layer: Layer) -> Node:
    """What a linear reads, before views that keep its rows whole."""
    node = first_input(layer.node)
    while _keeps_rows(node):
        node = first_input(node)
    return node


def _views(node: Node, source: Node) -> list[Node]:
    """The views that make `node` of `source`, first one first."""
    found: list[Node] = []
    while node is not source:
        if not is_inert(node):
            found.insert(0, node)
        node = first_input(node)
    return found


def _keeps_rows(node: Node) -> bool:
    """Whether each vector along the last dim of a node is one of its input's."""
    if is_inert(node):
        return True
    if is_call(node, *_RESHAPES):
        sizes = node.args[1]
        assert isinstance(sizes, list | tuple)
        return same_size(last_dim(node), last_dim(first_input(node))) and isinstance(sizes[-1], int)
    if is_call(node, aten.unsqueeze.default):
        return node.args[1] not in (-1, len(shape_of(node)) - 1)
    if is_call(node, aten.flatten.using_ints):
        whole = same_size(last_dim(node), last_dim(first_input(node)))
        return whole and len(node.args) > 2 and len(shape_of(node)) > 1
    return False


def _of_scale(view: Node) -> tuple[object, ...]:
    """The arguments with which a view of [..., K] becomes one of [..., 1]."""
    if not is_call(view, *_RESHAPES):
        return view.args[1:]
    sizes = view.args[1]
    assert isinstance(sizes, list | tuple)
    return ([*sizes[:-1], 1],)


def _after(node: Node) -> Node:
    """The node before which to insert what stands right after a node."""
    found = node.next
    while found.op == "placeholder":
        found = found.next
    return found
