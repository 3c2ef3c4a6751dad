"""Carry out a quantization plan: what `fp8-matmul` and `int8-matmul` share.

    storage   %w: bf16[128, 64] = enginecast.dequantize(%q, %s, bf16)
              %y = aten.linear(%x, %w, %bias)
    blocks    %y = enginecast.blockwise_linear(%x, %q, %s, %bias, 4, False)
    w8a8      %y = enginecast.quantized_linear(%xq, %xs, %q, %s, %bias, bf16)
    rows of a table
              %y = enginecast.dequantize(aten.embedding(%q, %ids), aten.embedding(%s, %ids), bf16)

Biases stay as they are.  Weights are expressions, quantized while the engine is written:

    %s: f32[128, 1] = enginecast.dynamic_scale(%w, fp8, True)
    %q: fp8[128, 64] = enginecast.quantize(%w, %s, fp8)

A convolution in int8 reads and gives unsigned integers, whose scale and zero come from the
calibration inputs; a rectifier behind it is a limit of what it gives.  Values that are held so stay
so up to the next convolution, through pools, views and sums, and are floats for anything else:

    %q: u8[2, 64, 9, 9] = enginecast.quantize_affine(%x, %xs, 117, u8)
    %c: u8[2, 64, 9, 9] = enginecast.quantized_conv(%q, %xs, 117, %w, %ws, %b, ..., %ys, 0, 0.0)
    %relu: f32[2, 64, 9, 9] = enginecast.dequantize_affine(%c, %ys, 0, f32)

An LSTM or a GRU reads floats and rounds them itself, at each step anew:

    %r = enginecast.quantized_lstm(%x, %h, %c, %w, %ws, %u, %us, %b)
    %r = enginecast.quantized_gru(%x, %h, %w, %ws, %u, %us, %b, %c, False)

A scale that a backend holds in fp16 or bf16 is rounded up to that dtype: rounded down, the largest
value of a row would no longer fit.  What linears read is quantized once for all that read one
value, or views of one (x and x.view(-1, 64)):

    %norm = aten.rms_norm(...)
    %xs: f32[2, 7, 1] = enginecast.dynamic_scale(%norm, fp8, True)     right after the producer, so
    %xq: fp8[2, 7, 64] = enginecast.quantize(%norm, %xs, fp8)          that a backend can fuse them
"""

import sys
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import Node

from enginecast.errors import PassError
from enginecast.ops.quantize import LIMITS, SMALLEST_SCALE, ZERO
from enginecast.ops.quantized_conv import LARGEST
from enginecast.passes.ir.base import PassContext, Promise, Site
from enginecast.passes.ir.edit import (
    SCALE,
    add_weight,
    arguments,
    aten,
    drop_unused_weights,
    dtype_of,
    erase_dead,
    first_input,
    free_name,
    insert,
    insert_item,
    same_size,
    shape_of,
    weight_value,
)
from enginecast.passes.ir.effects import own
from enginecast.passes.ir.match import behind_casts, is_call, is_inert, last_dim
from enginecast.passes.ir.quantization_plan import (
    LayerPlan,
    QuantizationPlan,
    Scaling,
    attach_plan,
    plan_of,
)
from enginecast.passes.ir.sites import SiteLog
from enginecast.passes.ir.source import module_path
from enginecast.passes.precision.cast_borders import mark_border
from enginecast.passes.quantize.measure.quantizable import (
    Layer,
    Tail,
    TransposedGeometry,
    find_layers,
    geometry_of,
    integer_values,
    is_product_of_integers,
    joined_integers,
    origin_in_order,
    products_as_linears,
    recurrence_of,
    spans_wanted,
    tail_of,
    transposed_geometry_of,
)
from enginecast.passes.quantize.measure.simulate import Span, activation_spans, with_joined
from enginecast.passes.quantize.plan.check import check_plan
from enginecast.passes.quantize.plan.options import BEFORE, QuantizingPass
from enginecast.passes.quantize.plan.planning import make_plan

DONE = "enginecast_quantized"
"""Where a program says which layers of its plan were carried out: in the metadata of its graph
module, as keys of `QuantizationPlan.by_site`."""

ScaleDtype = Literal["fp32", "fp16", "bf16"]
Chosen = tuple[Layer, LayerPlan]

_HALF_STEPS: dict[ScaleDtype, tuple[torch.dtype, float, float]] = {
    "fp16": (torch.float16, 2.0**-11, 2.0**-25),
    "bf16": (torch.bfloat16, 2.0**-8, 0.0),
}
"""Half a step of each dtype: relative to a normal value, and of those below the smallest normal
one.  With that added, rounding to nearest never falls below the value."""
_RESHAPES = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)


@dataclass(frozen=True)
class QuantizeLayers(QuantizingPass):
    """Rewrite the layers that a plan quantizes."""

    promise: ClassVar[Promise] = "precision"
    after: ClassVar[frozenset[str]] = BEFORE | {"plan-fp8", "plan-int8"}
    carries_out_plan: ClassVar[bool] = True

    scale_dtype: ScaleDtype = "fp32"

    @abstractmethod
    def dtype(self, arch: str) -> torch.dtype:
        """Of quantized values."""

    def native_refusal(self, layer: Layer, plan: LayerPlan, arch: str) -> str:
        """Why an architecture has no product of quantized values for a layer; empty: it has."""
        return ""

    def run(self, program: ExportedProgram, context: PassContext) -> list[Site]:
        products_as_linears(program)
        plan = self._plan(program, context)
        layers = find_layers(program)
        _check_known(program, plan, layers)
        log = SiteLog(context)
        chosen = self._chosen(program, plan, layers, log)
        chosen, spans = _static_spans(program, context, chosen, log)
        writer = _Writer(program, self.dtype(plan.arch), self.scale_dtype, chosen, spans)
        for layer, found in chosen:
            log.done(layer.node, _described(found))
            if not is_product_of_integers(found) and layer.kind not in ("lstm", "gru"):
                writer.rewrite(layer, found)
        writer.integers()
        # Last: it puts other nodes in the place of those that it gives, by which the others know
        # what they read.
        for layer, found in chosen:
            if layer.kind in ("lstm", "gru"):
                writer.rewrite(layer, found)
        erase_dead(program.graph)
        drop_unused_weights(program)
        done = program.graph_module.meta.get(DONE, frozenset())
        program.graph_module.meta[DONE] = done | {layer.key for layer, _ in chosen}
        return log.sites

    def _plan(self, program: ExportedProgram, context: PassContext) -> QuantizationPlan:
        plan = plan_of(program)
        if plan is None and context.plan is not None:
            plan = check_plan(program, context.plan, self.options)
        plan = plan or make_plan(program, context, self.options)
        if plan.format != self.format:
            raise PassError(
                f"the plan is for {plan.format}, and {self.name} carries out {self.format}",
                hint=f"Use {plan.format}-matmul, or make another plan.",
            )
        attach_plan(program, plan)
        return plan

    def _chosen(
        self, program: ExportedProgram, plan: QuantizationPlan, layers: list[Layer], log: SiteLog
    ) -> list[Chosen]:
        """The layers to rewrite; of the others, the log has the reason."""
        decisions = plan.by_site()
        chosen = []
        for layer in layers:
            if log.skipped(layer.node):
                continue
            found = decisions.get(layer.key)
            if found is None:
                log.refused(layer.node, "the plan does not name it")
            elif reason := self._refusal(layer, found, plan.arch) or _not_finite(program, layer):
                log.refused(layer.node, reason)
            else:
                chosen.append((layer, found))
        return chosen

    def _refusal(self, layer: Layer, plan: LayerPlan, arch: str) -> str:
        if plan.choice == "keep":
            return f"kept: {plan.reason}" if plan.reason else "kept"
        if plan.choice == "storage" or plan.weights == "block":
            return ""
        return self.native_refusal(layer, plan, arch)


def _static_spans(
    program: ExportedProgram, context: PassContext, chosen: Sequence[Chosen], log: SiteLog
) -> tuple[list[Chosen], Mapping[Node, Span]]:
    """Least and largest elements of what layers with static scales read, and of convolutions what
    they give; and the layers without those where one of them is not finite.
    """
    static = {layer.node: found for layer, found in chosen if _is_static(found)}
    linears = {
        layer.node: _origin(layer)
        for layer, found in chosen
        if _is_static(found) and layer.kind == "linear"
    }
    whole = spans_wanted(program.graph, static)
    spans = with_joined(activation_spans(program, context, set(linears.values()), whole), static)
    left = []
    for layer, found in chosen:
        values = [linears[layer.node]] if layer.node in linears else []
        if is_product_of_integers(found):
            values = [origin_in_order(first_input(layer.node)), tail_of(layer.node).node]
        if not all(spans[value].is_finite for value in values):
            log.refused(layer.node, "what it reads is not finite on the calibration inputs")
        else:
            left.append((layer, found))
    return left, spans


def _is_static(plan: LayerPlan) -> bool:
    return plan.choice == "w8a8-static"


class _Writer:
    """Makes the nodes of each form.

    Args:
        dtype: of quantized values.
        spans: least and largest elements of each value whose scale is static.
    """

    def __init__(
        self,
        program: ExportedProgram,
        dtype: torch.dtype,
        scale_dtype: ScaleDtype,
        chosen: Sequence[Chosen],
        spans: Mapping[Node, Span],
    ) -> None:
        self._program = program
        self._dtype = dtype
        self._scale_dtype = scale_dtype
        self._spans = spans
        self._weights: dict[tuple[object, ...], tuple[Node, Node]] = {}
        self._shared: dict[_Shared, tuple[Node, Node, Node]] = {}
        self._read: dict[_Shared, set[Node]] = defaultdict(set)
        self._integers = _Integers(program, chosen, spans, self._conv_scale)
        for layer, plan in chosen:
            if is_product_of_integers(plan):
                continue
            if plan.activations in ("tensor", "row"):
                self._read[_shared(layer, plan)].add(first_input(layer.node))

    def integers(self) -> None:
        """Rewrite the convolutions in int8, all at once."""
        self._integers.rewrite()

    def _conv_scale(self, layer: Layer, plan: LayerPlan) -> Node:
        return self._rounded_up(self._weight_scale(behind_casts(layer.weight), layer, plan), layer)

    def rewrite(self, layer: Layer, plan: LayerPlan) -> None:
        """Change the node of a layer; it stays the same node, with its name."""
        node = layer.node
        if layer.kind in ("lstm", "gru", "rnn"):
            self._recur(layer, plan)
            return
        values, scale = self._weight(layer, plan)
        bias = node.args[2] if len(node.args) > 2 else None
        if layer.kind == "embedding":
            self._pick(layer, plan, values, scale)
        elif plan.weights == "block":
            both = plan.activations is not None
            blocks = (first_input(node), values, scale, bias, plan.bits, both)
            _change(node, own.blockwise_linear.default, blocks)
        elif plan.choice != "storage":
            args = (*self._activations(layer, plan), values, scale, bias, dtype_of(node))
            _change(node, own.quantized_linear.default, args)
        else:
            with self._program.graph.inserting_before(node):
                dtype = dtype_of(layer.weight)
                whole = self._insert(layer, own.dequantize.default, values, scale, dtype)
            node.update_arg(1, whole)

    def _pick(self, layer: Layer, plan: LayerPlan, values: Node, scale: Node) -> None:
        _, ids, *_ = layer.node.args
        dtype = dtype_of(layer.weight)
        with self._program.graph.inserting_before(layer.node):
            rest = layer.node.args[1:]
            picked = self._insert(layer, aten.embedding.default, values, *rest)
            if shape_of(scale):
                scale = self._insert(layer, aten.embedding.default, scale, ids)
            if plan.weights != "block":
                _change(layer.node, own.dequantize.default, (picked, scale, dtype))
                return
            blocks = self._insert(layer, aten.unflatten.int, picked, -1, [-1, plan.block])
            scale = self._insert(layer, aten.unsqueeze.default, scale, -1)
            rows = self._insert(layer, own.dequantize.default, blocks, scale, dtype)
        _change(layer.node, aten.flatten.using_ints, (rows, -2))

    def _recur(self, layer: Layer, plan: LayerPlan) -> None:
        node = layer.node
        with self._program.graph.inserting_before(node):
            if plan.choice != "storage":
                (self._lstm if layer.kind == "lstm" else self._gru)(layer, plan)
                return
            stored = []
            for weight in arguments(node)[2]:
                if len(shape_of(weight)) != 2:
                    stored.append(weight)
                    continue
                values, scale = self._matrix(layer, weight, plan)
                dtype = dtype_of(weight)
                stored.append(self._insert(layer, own.dequantize.default, values, scale, dtype))
            node.update_arg(2, stored)

    def _matrix(self, layer: Layer, weight: Node, plan: LayerPlan) -> tuple[Node, Node]:
        """A weight [N, K] by rows, and its scales [N, 1]."""
        whole = behind_casts(weight)
        read = self._neighbors(whole, layer) if plan.bits == 7 else whole
        scale = self._insert(layer, own.dynamic_scale.default, read, self._dtype, True)
        scale = self._rounded_up(scale, layer)
        return self._insert(layer, own.quantize.default, whole, scale, self._dtype), scale

    def _lstm(self, layer: Layer, plan: LayerPlan) -> None:
        """A product of integers for each layer of it."""
        node = layer.node
        found = recurrence_of(node, arguments(node)[2])
        rows = first_input(node)
        if found.batch_first:
            rows = self._insert(layer, aten.transpose.int, rows, 0, 1)
        start = arguments(node)[1]
        ends: list[list[Node]] = []
        for at, directions in enumerate(found.steps):
            count = len(directions)
            states = [
                self._insert(layer, aten.slice.Tensor, first, 0, at * count, (at + 1) * count)
                for first in start
            ]
            weights = self._gates(layer, [each[0] for each in directions], plan)
            kept = self._gates(layer, [each[1] for each in directions], plan)
            biases = [self._in_order(layer, bias) for each in directions for bias in each[2:]]
            bias = None
            if biases:
                flat = self._insert(layer, aten.cat.default, biases)
                bias = self._insert(layer, aten.reshape.default, flat, [count, -1])
            op = own.quantized_lstm.default
            result = self._insert(layer, op, rows, *states, *weights, *kept, bias)
            items = [
                insert_item(self._program.graph, result, place, like=node) for place in range(3)
            ]
            rows, ends = items[0], [*ends, items[1:]]
        if found.batch_first:
            rows = self._insert(layer, aten.transpose.int, rows, 0, 1)
        last = [
            self._insert(layer, aten.cat.default, list(some)) for some in zip(*ends, strict=True)
        ]
        results = [rows, *last]
        for item in list(node.users):
            item.replace_all_uses_with(results[arguments(item)[1]])

    def _gru(self, layer: Layer, plan: LayerPlan) -> None:
        """A product of integers for each direction of each layer of it."""
        node, graph = layer.node, self._program.graph
        found = recurrence_of(node, arguments(node)[2])
        rows = first_input(node)
        if found.batch_first:
            rows = self._insert(layer, aten.transpose.int, rows, 0, 1)
        start = arguments(node)[1]
        ends: list[Node] = []
        for directions in found.steps:
            outputs = []
            for backward, (weight, kept, *biases) in enumerate(directions):
                state = self._insert(layer, aten.select.int, start, 0, len(ends))
                products = []
                for matrix in (weight, kept):
                    values, scale = self._matrix(layer, matrix, plan)
                    products.append(self._insert(layer, aten.t.default, values))
                    products.append(self._insert(layer, aten.reshape.default, scale, [-1]))
                both = biases or [None, None]
                op = own.quantized_gru.default
                result = self._insert(layer, op, rows, state, *products, *both, bool(backward))
                outputs.append(insert_item(graph, result, 0, like=node))
                ends.append(insert_item(graph, result, 1, like=node))
            rows = self._insert(layer, aten.cat.default, outputs, -1)
        if found.batch_first:
            rows = self._insert(layer, aten.transpose.int, rows, 0, 1)
        results = [rows, self._insert(layer, aten.stack.default, ends)]
        for item in list(node.users):
            item.replace_all_uses_with(results[arguments(item)[1]])

    def _gates(self, layer: Layer, matrices: Sequence[Node], plan: LayerPlan) -> tuple[Node, Node]:
        """The matrices of all directions as [D, K, 4H], and their scales [D, 4H]."""
        values, scales = [], []
        for matrix in matrices:
            quantized, scale = self._matrix(layer, matrix, plan)
            turned = self._insert(layer, aten.t.default, self._in_order(layer, quantized))
            values.append(self._insert(layer, aten.unsqueeze.default, turned, 0))
            flat = self._insert(layer, aten.reshape.default, self._in_order(layer, scale), [1, -1])
            scales.append(flat)
        whole = (self._insert(layer, aten.cat.default, found) for found in (values, scales))
        first, second = whole
        return first, second

    def _in_order(self, layer: Layer, gates: Node) -> Node:
        """Rows of torch's gates (input, forget, cell, output) in ONNX's order."""
        size = shape_of(gates)[0] // 4
        parts = [
            self._insert(layer, aten.slice.Tensor, gates, 0, at * size, (at + 1) * size)
            for at in (0, 3, 1, 2)
        ]
        return self._insert(layer, aten.cat.default, parts)

    def _weight(self, layer: Layer, plan: LayerPlan) -> tuple[Node, Node]:
        """Values and scale of a layer's weight, as expressions that stand before the layer; layers
        that share a weight share them.

        The values have the weight's shape; the scale is [], [N, 1] (for a conv [N, 1, ..., 1]) or,
        for blocks, [N, K / block].  They are made of the weight as it is stored: rounding it to the
        compute dtype before would be a second rounding.
        """
        weight = behind_casts(layer.weight)
        key = (weight, plan.weights, plan.block, plan.bits, layer.kind)
        if key not in self._weights:
            with self._program.graph.inserting_before(layer.node):
                scale = self._rounded_up(self._weight_scale(weight, layer, plan), layer)
                op = own.quantize_blocks if plan.weights == "block" else own.quantize
                how = plan.bits if plan.weights == "block" else self._dtype
                self._weights[key] = self._insert(layer, op.default, weight, scale, how), scale
        return self._weights[key]

    def _weight_scale(self, weight: Node, layer: Layer, plan: LayerPlan) -> Node:
        scale_of, reshape = own.dynamic_scale.default, aten.reshape.default
        shape = shape_of(weight)
        if plan.weights == "block":
            sizes = [shape[0], shape[1] // plan.block, plan.block]
            blocks = self._insert(layer, reshape, weight, sizes)
            scale = self._insert(layer, scale_of, blocks, torch.int8, True)
            scale = self._coarser(scale, layer, plan)
            return self._insert(layer, aten.squeeze.dim, scale, -1)
        if plan.weights == "tensor" or not layer.kind.startswith("conv"):
            read = self._neighbors(weight, layer) if plan.bits == 7 else weight
            return self._insert(layer, scale_of, read, self._dtype, plan.weights == "row")
        if layer.kind == "conv-transpose" and is_product_of_integers(plan):
            geometry = transposed_geometry_of(layer.node)
            weight = _channels_first(weight, geometry, partial(self._insert, layer))
            shape = shape_of(weight)
        rows = self._insert(layer, aten.flatten.using_ints, weight, 1)
        scale = self._insert(layer, scale_of, rows, self._dtype, True)
        scale = self._coarser(scale, layer, plan)
        return self._insert(layer, reshape, scale, [shape[0], *(1 for _ in shape[1:])])

    def _neighbors(self, weight: Node, layer: Layer) -> Node:
        """Of a weight [N, K] the sums of two neighbors along K, of those above zero and of those
        below: what they are multiplied with is added in 16 bits.
        """
        if shape_of(weight)[1] % 2:
            weight = self._insert(layer, aten.constant_pad_nd.default, weight, [0, 1])
        pairs = self._insert(layer, aten.unflatten.int, weight, 1, [-1, 2])
        signs = (pairs, self._insert(layer, aten.neg.default, pairs))
        sums = [
            self._insert(
                layer, aten.sum.dim_IntList, self._insert(layer, aten.relu.default, side), [-1]
            )
            for side in signs
        ]
        return self._insert(layer, aten.cat.default, sums, 1)

    def _coarser(self, scale: Node, layer: Layer, plan: LayerPlan) -> Node:
        """The scale of an int8 weight, with which its largest value takes the bits of the plan."""
        if plan.bits == 8:
            return scale
        steps = LIMITS[torch.int8] / (2 ** (plan.bits - 1) - 1)
        return self._insert(layer, aten.mul.Scalar, scale, steps)

    def _rounded_up(self, scale: Node, layer: Layer) -> Node:
        if self._scale_dtype == "fp32":
            return scale
        dtype, relative, least = _HALF_STEPS[self._scale_dtype]
        found = self._insert(layer, aten.mul.Scalar, scale, 1.0 + relative)
        found = self._insert(layer, aten.add.Scalar, found, least)
        for to in (dtype, torch.float32):
            found = self._insert(layer, aten.to.dtype, found, to)
            mark_border(found, f"a scale that {self._scale_dtype} holds exactly")
        return found

    def _activations(self, layer: Layer, plan: LayerPlan) -> tuple[Node, Node]:
        """Quantized values and scale of what a linear reads."""
        shared = _shared(layer, plan)
        if shared not in self._shared:
            self._shared[shared] = self._share(shared, layer)
        values, scale, source = self._shared[shared]
        with self._program.graph.inserting_before(layer.node):
            for view in _views(first_input(layer.node), source):
                values = self._insert(layer, view.target, values, *view.args[1:])
                if shape_of(scale):
                    scale = self._insert(layer, view.target, scale, *_of_scale(view))
        return values, scale

    def _share(self, shared: "_Shared", layer: Layer) -> tuple[Node, Node, Node]:
        """Values, scale, and what they were made of."""
        origin, scaling, static = shared
        read = self._read[shared]
        source = origin if len(read) > 1 else next(iter(read))
        known = None
        if static:
            known = self._static_scale(self._spans[origin].largest, layer)
        with self._program.graph.inserting_before(_after(source)):
            scale = known or self._insert(
                layer, own.dynamic_scale.default, source, self._dtype, scaling == "row"
            )
            values = self._insert(layer, own.quantize.default, source, scale, self._dtype)
        return values, scale, source

    def _static_scale(self, largest: float, layer: Layer) -> Node:
        scale = max(largest / LIMITS[self._dtype], SMALLEST_SCALE)
        name = free_name(self._program, f"{layer.module or 'model'}.input_scale")
        tensor = _static_rounded_up(torch.tensor(scale, dtype=torch.float32), self._scale_dtype)
        return add_weight(self._program, name, tensor, InputKind.CONSTANT_TENSOR)

    def _insert(self, layer: Layer, target: Any, *args: object) -> Node:
        node = insert(self._program.graph, target, args, like=layer.node)
        node.meta.pop(SCALE, None)  # a scale carries the power of two, if there is one
        return node


@dataclass(frozen=True)
class _Held:
    """A value in unsigned integers."""

    values: Node
    scale: Node
    zero: int

    @property
    def arguments(self) -> tuple[Node, Node, int]:
        return self.values, self.scale, self.zero


class _Integers:
    """Rewrites convolutions in int8, and the sums between them.

    Args:
        chosen: the convolutions among them are rewritten.
        spans: of every value in `spans_wanted`.
        weight_scale: gives the scale of a layer's weight, as a weight expression.
    """

    def __init__(
        self,
        program: ExportedProgram,
        chosen: Sequence[Chosen],
        spans: Mapping[Node, Span],
        weight_scale: Callable[[Layer, LayerPlan], Node],
    ) -> None:
        self._program = program
        self._spans = spans
        self._weight_scale = weight_scale
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
            limits = tail_of(node)
            with self._program.graph.inserting_before(node):
                scale, zero = self._grid(tail)
                ends = (zero, *self._limits(limits))
                if node in self._convs:
                    held = _Held(self._conv(*self._convs[node], scale, ends), scale, zero)
                else:
                    sides = [self._read(side) for side in node.args if isinstance(side, Node)]
                    args = (*sides[0].arguments, *sides[1].arguments, scale, *ends)
                    held = _Held(self._add(node, own.quantized_add.default, *args), scale, zero)
            # Whatever else reads the value reads the integers as floats.
            _change(tail, own.dequantize_affine.default, (*held.arguments, dtype_of(tail)))
            self._held[tail] = held

    def _limits(self, tail: Tail) -> tuple[float | None, float | None]:
        """Those of a value that its integers could pass: they were measured within them, and reach
        no further, but to 0.
        """
        span = self._spans[tail.node]
        low = None if tail.low is None or tail.low <= min(span.low, 0.0) else tail.low
        high = None if tail.high is None or tail.high >= max(span.high, 0.0) else tail.high
        return low, high

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
        scale = self._weight_scale(layer, plan)
        bias = node.args[2] if len(node.args) > 2 else None
        if isinstance(bias, Node):
            scale, bias = self._bias(bias, read.scale, scale)
        add = partial(self._add, node)
        if layer.kind == "conv":
            geometry = geometry_of(node)
            values = add(own.quantize.default, weight, scale, torch.int8)
            sizes = (geometry.stride, geometry.padding, geometry.dilation)
            how = (*map(list, sizes), geometry.groups)
            parts = (*read.arguments, values, scale, bias)
            return add(own.quantized_conv.default, *parts, *how, y_scale, *ends)
        return _interleaved(node, read.arguments, (weight, scale, bias), (y_scale, *ends), add)

    def _bias(self, bias: Node, x_scale: Node, scale: Node) -> tuple[Node, Node]:
        """The scale of a weight, raised where the bias would not fit into int32 beside it, and the
        bias.
        """
        size = self._add(bias, aten.abs.default, bias)
        least = self._add(bias, aten.div.Tensor, size, x_scale)
        least = self._add(bias, aten.mul.Scalar, least, 1 / LIMITS[torch.int32])
        least = self._add(bias, aten.reshape.default, least, list(shape_of(scale)))
        scale = self._add(bias, aten.maximum.default, scale, least)
        flat = self._add(bias, aten.reshape.default, scale, [-1])
        of_sums = self._add(bias, aten.mul.Tensor, flat, x_scale)
        return scale, self._add(bias, own.quantize.default, bias, of_sums, torch.int32)

    def _read(self, source: Node) -> _Held:
        """A value in integers: those that it is taken from, or its own."""
        if source in self._held:
            return self._held[source]
        origin = origin_in_order(source)
        if source in self._joined:
            found = self._join(source)
            self._held[source] = found
            return found
        if origin in self._joined:
            self._read(origin)
        with self._program.graph.inserting_before(_after(source)):
            if origin in self._held:
                before = self._read(first_input(source))
                args = (before.values, *source.args[1:])
                assert callable(source.target)
                kwargs = dict(source.kwargs)
                moved = insert(self._program.graph, source.target, args, kwargs, like=source)
                found = replace(before, values=moved)
            else:
                scale, zero = self._grid(origin)
                quantize = own.quantize_affine.default
                values = self._add(source, quantize, source, scale, zero, torch.uint8)
                found = _Held(values, scale, zero)
        self._held[source] = found
        return found

    def _join(self, node: Node) -> _Held:
        """A concatenation of integers, which have one scale."""
        parts, *dim = arguments(node)
        values = [self._read(part).values for part in parts]
        scale, zero = self._grid(node)
        with self._program.graph.inserting_before(_after(node)):
            return _Held(self._add(node, aten.cat.default, values, *dim), scale, zero)

    def _grid(self, node: Node) -> tuple[Node, int]:
        """The scale of a value, and what stands for 0."""
        if node not in self._grids:
            scale, zero = _grid_of(self._spans[node], len(shape_of(node)))
            name = free_name(self._program, f"{module_path(node) or 'model'}.value_scale")
            constant = InputKind.CONSTANT_TENSOR
            self._grids[node] = add_weight(self._program, name, scale, constant), zero
        return self._grids[node]

    def _add(self, like: Node, target: Any, *args: object) -> Node:
        return insert(self._program.graph, target, args, like=like)


_Add = Callable[..., Node]
"""Makes a call at the insertion point."""


def _channels_first(weight: Node, geometry: TransposedGeometry, add: _Add) -> Node:
    """`channels_first` of a weight expression."""
    whole = add(aten.unflatten.int, weight, 0, [geometry.groups, -1])
    return add(aten.flatten.using_ints, add(aten.transpose.int, whole, 1, 2), 0, 1)


def _interleaved(
    node: Node,
    read: tuple[Node, Node, int],
    weights: tuple[Node, Node, object],
    ends: tuple[Node, int, float | None, float | None],
    add: _Add,
) -> Node:
    """A transposed convolution as one convolution, whose channels are then laid side by side: the
    same products of integers in the same sums.

    Channels come last while they are: so whole rows of them are copied.

    Args:
        read: quantized values, their scale, and what stands for 0.
        weights: weight, its scale [N, 1, ...], and the bias, int32, or None.
        ends: scale of the result, what stands for 0 in it, and its limits.
    """
    geometry = transposed_geometry_of(node)
    weight, scale, bias = weights
    y_scale, *limits = ends
    dims, groups = len(geometry.taps), geometry.groups
    values = add(own.quantize.default, _channels_first(weight, geometry, add), scale, torch.int8)
    for at, step in enumerate(geometry.dilation):
        if step > 1:
            values = _dilated(values, 2 + at, step, add)
    phases = prod(geometry.stride)
    if phases > 1:
        values = _by_phase(values, geometry, add)
        each = partial(_for_each_phase, groups=groups, phases=phases, add=add)
        scale = each(scale, dims=dims)
        bias = each(bias, dims=0) if isinstance(bias, Node) else None
        y_scale = each(y_scale, dims=dims) if shape_of(y_scale) else y_scale
    else:
        values = add(aten.flip.default, values, list(range(2, 2 + dims)))
    ones = [1] * dims
    how = (ones, list(geometry.padding), ones, groups)
    found = add(own.quantized_conv.default, *read, values, scale, bias, *how, y_scale, *limits)
    if phases == 1:
        return found
    found = add(aten.permute.default, found, [0, *range(2, 2 + dims), 1])
    found = add(aten.unflatten.int, found, -1, [groups, *geometry.stride, -1])
    pairs = [place for at in range(dims) for place in (1 + at, 2 + dims + at)]
    found = add(aten.permute.default, found, [0, *pairs, 1 + dims, 2 + 2 * dims])
    for at in range(1, dims + 2):
        found = add(aten.flatten.using_ints, found, at, at + 1)
    for at, (start, end) in enumerate(geometry.cropped):
        if start or end:
            stop = -end if end else sys.maxsize
            found = add(aten.slice.Tensor, found, 1 + at, start, stop)
    return add(aten.permute.default, found, [0, 1 + dims, *range(1, 1 + dims)])


def _dilated(values: Node, dim: int, step: int, add: _Add) -> Node:
    """A kernel with zeros between its elements along a dim."""
    count = len(shape_of(values))
    size = shape_of(values)[dim]
    found = add(aten.unsqueeze.default, values, dim + 1)
    behind = [0, 0] * (count - 1 - dim)
    found = add(aten.constant_pad_nd.default, found, [*behind, 0, step - 1])
    found = add(aten.flatten.using_ints, found, dim, dim + 1)
    return add(aten.slice.Tensor, found, dim, 0, step * (size - 1) + 1)


def _by_phase(values: Node, geometry: TransposedGeometry, add: _Add) -> Node:
    """A kernel [N, C, size...] as those of all phases, backward, with zeros behind it where it does
    not fill the last tap: [groups * phases * N / groups, C, taps...].
    """
    dims = len(geometry.taps)
    pads: list[int] = []
    for at, (taps, step) in enumerate(zip(geometry.taps, geometry.stride, strict=True)):
        pads = [0, taps * step - shape_of(values)[2 + at], *pads]
    found = add(aten.constant_pad_nd.default, values, pads)
    for at, step in enumerate(geometry.stride):
        found = add(aten.unflatten.int, found, 2 + 2 * at, [-1, step])
    found = add(aten.flip.default, found, [2 + 2 * at for at in range(dims)])
    found = add(aten.unflatten.int, found, 0, [geometry.groups, -1])
    places = [3 + 2 * at for at in range(dims)]
    found = add(aten.permute.default, found, [0, *(at + 1 for at in places), 1, 2, *places])
    return add(aten.flatten.using_ints, found, 0, 1 + dims)


def _for_each_phase(found: Node, groups: int, phases: int, dims: int, add: _Add) -> Node:
    """What is there for each channel, [N, 1, ...], for each channel of each phase."""
    found = add(aten.reshape.default, found, [groups, 1, -1])
    found = add(aten.expand.default, found, [-1, phases, -1])
    return add(aten.reshape.default, found, [-1, *[1] * dims])


def _grid_of(span: Span, dims: int) -> tuple[Tensor, int]:
    """The scale of what reaches over a span, fp32, [] or [N, 1, ...], and what stands for 0."""
    low, high = min(span.low, 0.0), max(span.high, 0.0)
    if span.channels is not None:
        zero = ZERO if low < 0 else 0
        scales = (span.channels / (LARGEST - zero)).clamp(min=SMALLEST_SCALE)
        return scales.reshape(-1, *[1] * (dims - 2)), zero
    scale = torch.tensor(max((high - low) / LARGEST, SMALLEST_SCALE), dtype=torch.float32)
    return scale, min(max(round(-low / float(scale)), 0), LARGEST)


_Shared = tuple[Node, Scaling | None, bool]
"""What linears share that read one value: that value before views of it, what shares one scale in
it, and whether the scale is static."""


def _shared(layer: Layer, plan: LayerPlan) -> _Shared:
    return _origin(layer), plan.activations, _is_static(plan)


def _change(node: Node, target: Any, args: tuple[Any, ...]) -> None:
    node.target, node.args, node.kwargs = target, args, {}


def _static_rounded_up(scale: Tensor, scale_dtype: ScaleDtype) -> Tensor:
    """A scale of activations, fp32, as `scale_dtype` holds it: exactly, and not below its value.

    In fp16 it is not a subnormal: a backend may multiply by its reciprocal, which fp16 would
    not hold.
    """
    if scale_dtype == "fp32":
        return scale
    dtype, relative, _ = _HALF_STEPS[scale_dtype]
    smallest = torch.finfo(dtype).tiny
    return (scale * (1.0 + relative)).clamp(min=smallest).to(dtype).float()


def _not_finite(program: ExportedProgram, layer: Layer) -> str:
    """Why a weight cannot be quantized: it holds infinities or NaN; empty when it does not."""
    weight = weight_value(program, behind_casts(layer.weight))
    if bool(weight.abs().amax().isfinite()):
        return ""
    bad = (~weight.flatten(1).isfinite().all(1)).nonzero()
    first = int(bad[0])
    return f"{layer.name} is not finite in {len(bad)} of {len(weight)} rows (the first is {first})"


def _origin(layer: Layer) -> Node:
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


def _check_known(program: ExportedProgram, plan: QuantizationPlan, layers: list[Layer]) -> None:
    """A layer that a pass after the plan took away would be quantized by nobody."""
    done = program.graph_module.meta.get(DONE, frozenset())
    known = {layer.key for layer in layers} | done
    missing = [f"{p.module} {p.source}" for key, p in plan.by_site().items() if key not in known]
    if missing:
        raise PassError(
            f"the plan names {len(missing)} layers that the program does not have: "
            + ", ".join(missing[:5]),
            hint="Plan after all passes that merge or replace linears.",
        )


def _described(plan: LayerPlan) -> str:
    """The form: "w8a8-dynamic, rows"; "storage, 4 bits, blocks of 32"."""
    words = {"tensor": "one scale", "row": "rows", "block": f"blocks of {plan.block}"}
    parts = [plan.choice, *([f"{plan.bits} bits"] if plan.bits != 8 else []), words[plan.weights]]
    if plan.activations not in (None, plan.weights):
        parts.append(f"x: {words[plan.activations]}")
    return ", ".join(parts)
