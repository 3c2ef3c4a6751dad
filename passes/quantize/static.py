"""Convolutions in int8, and the sums and joins between them, whose values stay integers.

Scale and zero of each value come from how far it reaches on the calibration inputs.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import Node

from enginecast.ops.quantize import LIMITS, SMALLEST_SCALE, ZERO
from enginecast.ops.quantized_conv import LARGEST
from enginecast.passes.ir.edit import (
    add_weight,
    arguments,
    aten,
    dtype_of,
    first_input,
    free_name,
    insert,
    shape_of,
)
from enginecast.passes.ir.effects import own
from enginecast.passes.ir.match import behind_casts
from enginecast.passes.ir.quantization_plan import LayerPlan
from enginecast.passes.ir.source import module_path
from enginecast.passes.quantize.dynamic import after
from enginecast.passes.quantize.measure.quantizable import (
    Layer,
    geometry_of,
    integer_values,
    is_product_of_integers,
    joined_integers,
    origin_in_order,
    tail_of,
    transposed_geometry_of,
)
from enginecast.passes.quantize.measure.spans import Span
from enginecast.passes.quantize.storage import Chosen, Weights, change


@dataclass(frozen=True)
class _Held:
    """A value in unsigned integers."""

    values: Node
    scale: Node
    zero: int

    @property
    def arguments(self) -> tuple[Node, Node, int]:
        return self.values, self.scale, self.zero


class Integers:
    """Rewrites convolutions in int8, and the sums between them.

    Args:
        chosen: the convolutions among them are rewritten.
        spans: of every value in `spans_wanted`.
    """

    def __init__(
        self,
        program: ExportedProgram,
        weights: Weights,
        chosen: Sequence[Chosen],
        spans: Mapping[Node, Span],
    ) -> None:
        self._program, self._weights, self._spans = program, weights, spans
        convs = [(layer, plan) for layer, plan in chosen if is_product_of_integers(plan)]
        self._convs = {layer.node: (layer, plan) for layer, plan in convs}
        plans = {layer.node: plan for layer, plan in convs}
        self._values = integer_values(program.graph, plans)
        self._joined = joined_integers(plans).keys()
        self._held: dict[Node, _Held] = {}
        self._grids: dict[Node, tuple[Node, int]] = {}

    def rewrite(self) -> None:
        """In graph order: what is read in integers is held in them before."""
        for tail, value in self._values.items():
            node = value.made_by
            limits, span = tail_of(node), self._spans[tail_of(node).node]
            # What was measured within limits reaches no further than they do, but to 0.
            low = None if limits.low is None or limits.low <= min(span.low, 0.0) else limits.low
            high = (
                None if limits.high is None or limits.high >= max(span.high, 0.0) else limits.high
            )
            with self._program.graph.inserting_before(node):
                scale, zero = self._grid(tail)
                if node in self._convs:
                    values = self._conv(*self._convs[node], scale, (zero, low, high))
                else:
                    sides = [self._read(side) for side in node.args if isinstance(side, Node)]
                    args = (*sides[0].arguments, *sides[1].arguments, scale, zero, low, high)
                    values = self._add(node, own.quantized_add.default, *args)
                held = _Held(values, scale, zero)
            # Whatever else reads the value reads the integers as floats.
            change(tail, own.dequantize_affine.default, (*held.arguments, dtype_of(tail)))
            self._held[tail] = held

    def _conv(
        self,
        layer: Layer,
        plan: LayerPlan,
        y_scale: Node,
        ends: tuple[int, float | None, float | None],
    ) -> Node:
        """
        Args:
            ends: what stands for 0 in the result, and its limits.
        """
        node = layer.node
        read = self._read(first_input(node))
        weight = behind_casts(layer.weight)
        add = partial(self._add, node)
        rows = weight
        if layer.kind == "conv-transpose":  # a row for each channel that it gives
            groups = transposed_geometry_of(node).groups
            whole = add(aten.unflatten.int, weight, 0, [groups, -1])
            whole = add(aten.transpose.int, whole, 1, 2)
            rows = add(aten.flatten.using_ints, whole, 0, 1)
        scale = self._weights.scale(layer, plan, rows)
        bias = node.args[2] if len(node.args) > 2 else None
        if isinstance(bias, Node):
            # Raised where the bias would not fit into int32 beside it.
            of_bias = partial(self._add, bias)
            least = of_bias(aten.div.Tensor, of_bias(aten.abs.default, bias), read.scale)
            least = of_bias(aten.mul.Scalar, least, 1 / LIMITS[torch.int32])
            least = of_bias(aten.reshape.default, least, list(shape_of(scale)))
            scale = of_bias(aten.maximum.default, scale, least)
            flat = of_bias(aten.reshape.default, scale, [-1])
            of_sums = of_bias(aten.mul.Tensor, flat, read.scale)
            bias = of_bias(own.quantize.default, bias, of_sums, torch.int32)
        values = add(own.quantize.default, rows, scale, torch.int8)
        if layer.kind == "conv":
            geometry = geometry_of(node)
            sizes = map(list, (geometry.stride, geometry.padding, geometry.dilation))
            how = (*sizes, geometry.groups, y_scale, *ends)
            return add(own.quantized_conv.default, *read.arguments, values, scale, bias, *how)
        return self._interleaved(node, read, (values, scale, bias), (y_scale, *ends))

    def _interleaved(
        self,
        node: Node,
        read: _Held,
        weights: tuple[Node, Node, object],
        ends: tuple[Node, int, float | None, float | None],
    ) -> Node:
        """A transposed convolution as one convolution, whose channels are then laid side by side:
        the same products of integers in the same sums.

        Channels come last while they are: so whole rows of them are copied.

        Args:
            weights: int8 [out, in / groups, kernel...], its scale [out, 1, ...], and the bias,
                int32, or None.
            ends: scale of the result, what stands for 0 in it, and its limits.
        """
        add = partial(self._add, node)
        geometry = transposed_geometry_of(node)
        values, scale, bias = weights
        y_scale, *limits = ends
        dims, groups, phases = len(geometry.taps), geometry.groups, prod(geometry.stride)
        places = range(dims)
        for at, step in enumerate(geometry.dilation):
            if step > 1:  # zeros between the elements of the kernel
                size = shape_of(values)[2 + at]
                values = add(aten.unsqueeze.default, values, 3 + at)
                behind = [0, 0] * (dims - 1 - at)
                values = add(aten.constant_pad_nd.default, values, [*behind, 0, step - 1])
                values = add(aten.flatten.using_ints, values, 2 + at, 3 + at)
                values = add(aten.slice.Tensor, values, 2 + at, 0, step * (size - 1) + 1)
        if phases == 1:
            values = add(aten.flip.default, values, [2 + at for at in places])
        else:
            # The kernels of all phases, backward, with zeros behind where they do not fill the last
            # tap: [groups * phases * out / groups, in, taps...].
            pads: list[int] = []
            for at, (taps, step) in enumerate(zip(geometry.taps, geometry.stride, strict=True)):
                pads = [0, taps * step - shape_of(values)[2 + at], *pads]
            values = add(aten.constant_pad_nd.default, values, pads)
            for at, step in enumerate(geometry.stride):
                values = add(aten.unflatten.int, values, 2 + 2 * at, [-1, step])
            values = add(aten.flip.default, values, [2 + 2 * at for at in places])
            values = add(aten.unflatten.int, values, 0, [groups, -1])
            taps_at = [3 + 2 * at for at in places]
            order = [0, *(at + 1 for at in taps_at), 1, 2, *taps_at]
            values = add(aten.permute.default, values, order)
            values = add(aten.flatten.using_ints, values, 0, 1 + dims)

            def for_each_phase(of_channels: Node, ones: Sequence[int]) -> Node:
                of_channels = add(aten.reshape.default, of_channels, [groups, 1, -1])
                of_channels = add(aten.expand.default, of_channels, [-1, phases, -1])
                return add(aten.reshape.default, of_channels, [-1, *ones])

            ones = [1] * dims
            scale = for_each_phase(scale, ones)
            bias = for_each_phase(bias, []) if isinstance(bias, Node) else None
            y_scale = for_each_phase(y_scale, ones) if shape_of(y_scale) else y_scale
        how = ([1] * dims, list(geometry.padding), [1] * dims, groups)
        args = (*read.arguments, values, scale, bias, *how, y_scale, *limits)
        result = add(own.quantized_conv.default, *args)
        if phases == 1:
            return result
        result = add(aten.permute.default, result, [0, *range(2, 2 + dims), 1])
        result = add(aten.unflatten.int, result, -1, [groups, *geometry.stride, -1])
        pairs = [place for at in places for place in (1 + at, 2 + dims + at)]
        result = add(aten.permute.default, result, [0, *pairs, 1 + dims, 2 + 2 * dims])
        for at in range(1, dims + 2):
            result = add(aten.flatten.using_ints, result, at, at + 1)
        for at, (start, end) in enumerate(geometry.cropped):
            if start or end:
                stop = -end if end else sys.maxsize
                result = add(aten.slice.Tensor, result, 1 + at, start, stop)
        return add(aten.permute.default, result, [0, 1 + dims, *range(1, 1 + dims)])

    def _read(self, source: Node) -> _Held:
        """A value in integers: those that it is taken from, or its own."""
        if source in self._held:
            return self._held[source]
        origin = origin_in_order(source)
        if source in self._joined:
            # A concatenation of integers, which have one scale.
            parts, *dim = arguments(source)
            values = [self._read(part).values for part in parts]
            scale, zero = self._grid(source)
            with self._program.graph.inserting_before(after(source)):
                joined = self._add(source, aten.cat.default, values, *dim)
            self._held[source] = _Held(joined, scale, zero)
            return self._held[source]
        if origin in self._joined:
            self._read(origin)
        with self._program.graph.inserting_before(after(source)):
            if origin in self._held:
                before = self._read(first_input(source))
                args = (before.values, *source.args[1:])
                assert callable(source.target)
                kwargs = dict(source.kwargs)
                moved = insert(self._program.graph, source.target, args, kwargs, like=source)
                held = replace(before, values=moved)
            else:
                scale, zero = self._grid(origin)
                args = (source, scale, zero, torch.uint8)
                held = _Held(self._add(source, own.quantize_affine.default, *args), scale, zero)
        self._held[source] = held
        return held

    def _grid(self, node: Node) -> tuple[Node, int]:
        """The scale of a value, fp32, [] or [N, 1, ...], and what stands for 0."""
        if node not in self._grids:
            span = self._spans[node]
            low, high = min(span.low, 0.0), max(span.high, 0.0)
            if span.channels is not None:
                zero = ZERO if low < 0 else 0
                scale = (span.channels / (LARGEST - zero)).clamp(min=SMALLEST_SCALE)
                scale = scale.reshape(-1, *[1] * (len(shape_of(node)) - 2))
            else:
                step = max((high - low) / LARGEST, SMALLEST_SCALE)
                scale = torch.tensor(step, dtype=torch.float32)
                zero = min(max(round(-low / float(scale)), 0), LARGEST)
            name = free_name(self._program, f"{module_path(node) or 'model'}.value_scale")
            constant = InputKind.CONSTANT_TENSOR
            self._grids[node] = add_weight(self._program, name, scale, constant), zero
        return self._grids[node]

    def _add(self, like: Node, target: Any, *args: object) -> Node:
        return insert(self._program.graph, target, args, like=like)
