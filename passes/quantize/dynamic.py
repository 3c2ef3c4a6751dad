"""Products of quantized values: linears, which share what they read, LSTMs and GRUs.

The scale of what is read is computed from it, or a constant where the plan says static.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import Node

from enginecast.ops.quantize import LIMITS, SMALLEST_SCALE
from enginecast.passes.ir.edit import (
    add_weight,
    arguments,
    aten,
    dtype_of,
    first_input,
    free_name,
    insert_item,
    same_size,
    shape_of,
)
from enginecast.passes.ir.effects import own
from enginecast.passes.ir.match import is_call, is_inert, last_dim
from enginecast.passes.ir.quantization_plan import LayerPlan, Scaling
from enginecast.passes.quantize.measure.quantizable import Layer, recurrence_of
from enginecast.passes.quantize.measure.spans import Span
from enginecast.passes.quantize.storage import HALF_STEPS, Chosen, Weights, change

_RESHAPES = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)
_Shared = tuple[Node, Scaling | None, bool]
"""What linears share that read one value: that value before views of it, what shares one scale in
it, and whether the scale is static."""


class Inputs:
    """Rewrites linears, and quantizes once what several of them read.

    Args:
        spans: least and largest elements of each value whose scale is static.
    """

    def __init__(
        self,
        program: ExportedProgram,
        weights: Weights,
        chosen: Sequence[Chosen],
        spans: Mapping[Node, Span],
    ) -> None:
        self._program, self._weights, self._spans = program, weights, spans
        self._known: dict[_Shared, tuple[Node, Node, Node]] = {}
        """Values, scale, and what they were made of."""
        self._read: dict[_Shared, set[Node]] = defaultdict(set)
        for layer, plan in chosen:
            if plan.signed or (layer.kind == "linear" and plan.activations in ("tensor", "row")):
                self._read[_shared(layer, plan)].add(first_input(layer.node))

    def quantize(self, layer: Layer, plan: LayerPlan) -> None:
        """Let a linear multiply quantized values."""
        node, shared = layer.node, _shared(layer, plan)
        weight, weight_scale = self._weights.of(layer, plan)
        if shared not in self._known:
            self._known[shared] = self._quantized(layer, shared)
        values, scale, source = self._known[shared]
        views: list[Node] = []
        viewed = first_input(node)
        while viewed is not source:
            views += [] if is_inert(viewed) else [viewed]
            viewed = first_input(viewed)
        with self._program.graph.inserting_before(node):
            for view in reversed(views):
                values = self._weights.insert(layer, view.target, values, *view.args[1:])
                if not shape_of(scale):
                    continue
                sizes = arguments(view)[1:]  # of [..., K] to those of [..., 1]
                sizes = ([*sizes[0][:-1], 1],) if is_call(view, *_RESHAPES) else sizes
                scale = self._weights.insert(layer, view.target, scale, *sizes)
        bias = node.args[2] if len(node.args) > 2 else None
        args = (values, scale, weight, weight_scale, bias, dtype_of(node))
        change(node, own.quantized_linear.default, args)

    def quantize_convolution(self, layer: Layer, plan: LayerPlan) -> None:
        """Let a convolution read quantized values as floats, which TensorRT makes one of integers
        of: Q/DQ on what it reads, and on its weight.
        """
        node, shared = layer.node, _shared(layer, plan)
        weight = self._weights.of(layer, plan)
        if shared not in self._known:
            self._known[shared] = self._quantized(layer, shared)
        values, scale, _ = self._known[shared]
        with self._program.graph.inserting_before(node):
            for place, (quantized, step) in enumerate(((values, scale), weight)):
                args = (quantized, step, dtype_of(arguments(node)[place]))
                node.update_arg(place, self._weights.insert(layer, own.dequantize.default, *args))

    def _quantized(self, layer: Layer, shared: _Shared) -> tuple[Node, Node, Node]:
        origin, scaling, static = shared
        read, dtype = self._read[shared], self._weights.dtype
        source = origin if len(read) > 1 else next(iter(read))
        known = self._static_scale(layer, self._spans[origin].largest) if static else None
        with self._program.graph.inserting_before(after(source)):
            scale = known or self._weights.insert(
                layer, own.dynamic_scale.default, source, dtype, scaling == "row"
            )
            values = self._weights.insert(layer, own.quantize.default, source, scale, dtype)
        return values, scale, source

    def _static_scale(self, layer: Layer, largest: float) -> Node:
        """A constant that the dtype of scales holds exactly, and not below what is needed.

        In fp16 it is not a subnormal: a backend may multiply by its reciprocal, which fp16 would
        not hold.
        """
        least = max(largest / LIMITS[self._weights.dtype], SMALLEST_SCALE)
        scale = torch.tensor(least, dtype=torch.float32)
        if self._weights.scale_dtype != "fp32":
            dtype, relative, _ = HALF_STEPS[self._weights.scale_dtype]
            scale = (scale * (1.0 + relative)).clamp(min=torch.finfo(dtype).tiny).to(dtype).float()
        name = free_name(self._program, f"{layer.module or 'model'}.input_scale")
        return add_weight(self._program, name, scale, InputKind.CONSTANT_TENSOR)


def _shared(layer: Layer, plan: LayerPlan) -> _Shared:
    origin = first_input(layer.node) if plan.signed else origin_of(layer.node)
    return origin, plan.activations, plan.choice == "w8a8-static"


def origin_of(linear: Node) -> Node:
    """What a linear reads, before views that keep its rows whole."""
    node = first_input(linear)
    while _keeps_rows(node):
        node = first_input(node)
    return node


def _keeps_rows(node: Node) -> bool:
    """Whether each vector along the last dim of a node is one of its input's."""
    if is_inert(node):
        return True
    args = arguments(node)
    if is_call(node, aten.unsqueeze.default):
        return args[1] not in (-1, len(shape_of(node)) - 1)
    if not is_call(node, aten.flatten.using_ints, *_RESHAPES):
        return False
    if not same_size(last_dim(node), last_dim(first_input(node))):
        return False
    if is_call(node, *_RESHAPES):
        return isinstance(args[1][-1], int)
    return len(args) > 2 and len(shape_of(node)) > 1


def after(node: Node) -> Node:
    """The node before which to insert what stands right after a node."""
    following = node.next
    while following.op == "placeholder":
        following = following.next
    return following


def quantize_recurrence(
    program: ExportedProgram, weights: Weights, layer: Layer, plan: LayerPlan
) -> None:
    """Let a recurrence read stored matrices; or multiply in integers: an LSTM by an op for each of
    its layers, a GRU by one for each direction of each.
    """
    node, graph = layer.node, program.graph

    def add(target: object, *args: object) -> Node:
        return weights.insert(layer, target, *args)

    def in_order(gates: Node) -> Node:
        """Rows of torch's gates (input, forget, cell, output) in ONNX's order."""
        size = shape_of(gates)[0] // 4
        ends = [(at * size, (at + 1) * size) for at in (0, 3, 1, 2)]
        return add(aten.cat.default, [add(aten.slice.Tensor, gates, 0, *each) for each in ends])

    def of_directions(matrices: Sequence[Node]) -> tuple[Node, Node]:
        """Matrices of an LSTM as [D, K, 4H], and their scales [D, 4H]."""
        values, scales = [], []
        for matrix in matrices:
            quantized, scale = weights.matrix(layer, matrix, plan)
            turned = add(aten.t.default, in_order(quantized))
            values.append(add(aten.unsqueeze.default, turned, 0))
            scales.append(add(aten.reshape.default, in_order(scale), [1, -1]))
        return add(aten.cat.default, values), add(aten.cat.default, scales)

    with graph.inserting_before(node):
        if plan.choice == "storage":
            stored = []
            for weight in arguments(node)[2]:
                if len(shape_of(weight)) == 2:
                    quantized = weights.matrix(layer, weight, plan)
                    weight = add(own.dequantize.default, *quantized, dtype_of(weight))
                stored.append(weight)
            node.update_arg(2, stored)
            return
        rows, start, given = arguments(node)[:3]
        recurrence = recurrence_of(node, given)
        if recurrence.batch_first:
            rows = add(aten.transpose.int, rows, 0, 1)
        ends: list[list[Node]] = []
        for at, directions in enumerate(recurrence.steps):
            count = len(directions)
            if layer.kind == "lstm":
                states = [
                    add(aten.slice.Tensor, first, 0, at * count, (at + 1) * count)
                    for first in start
                ]
                inputs, kept = (of_directions([each[i] for each in directions]) for i in (0, 1))
                bias = None
                if biases := [in_order(bias) for each in directions for bias in each[2:]]:
                    bias = add(aten.reshape.default, add(aten.cat.default, biases), [count, -1])
                result = add(own.quantized_lstm.default, rows, *states, *inputs, *kept, bias)
                rows, *last = (insert_item(graph, result, i, like=node) for i in range(3))
                ends.append(last)
                continue
            outputs = []
            for backward, (*matrices, first, second) in enumerate(
                each if recurrence.has_biases else (*each, None, None) for each in directions
            ):
                state = add(aten.select.int, start, 0, at * count + backward)
                products = []
                for matrix in matrices:
                    values, scale = weights.matrix(layer, matrix, plan)
                    products.append(add(aten.t.default, values))
                    products.append(add(aten.reshape.default, scale, [-1]))
                biases = [first, second]
                op = own.quantized_gru.default
                result = add(op, rows, state, *products, *biases, bool(backward))
                outputs.append(insert_item(graph, result, 0, like=node))
                ends.append([insert_item(graph, result, 1, like=node)])
            rows = add(aten.cat.default, outputs, -1)
        if recurrence.batch_first:
            rows = add(aten.transpose.int, rows, 0, 1)
        join = aten.cat.default if layer.kind == "lstm" else aten.stack.default
        results = [rows, *(add(join, list(some)) for some in zip(*ends, strict=True))]
    for item in list(node.users):
        item.replace_all_uses_with(results[arguments(item)[1]])
