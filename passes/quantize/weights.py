"""Weights that are quantised while the engine is written: expressions for values and scales.

    %s: f32[128, 1] = enginecast.dynamic_scale(%w, fp8, True)
    %q: fp8[128, 64] = enginecast.quantize(%w, %s, fp8)

A scale that a backend holds in fp16 or bf16 is rounded up to that dtype here: rounded down, the
largest value of a row would no longer fit.
"""

from typing import Literal

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import Graph, Node

from enginecast.passes.ir.edit import SCALE, aten, insert, shape_of, weight_value
from enginecast.passes.ir.effects import own
from enginecast.passes.ir.match import behind_casts
from enginecast.passes.ir.quantization_plan import LayerPlan
from enginecast.passes.precision.cast_borders import mark_border
from enginecast.passes.quantize.measure.quantizable import Layer

ScaleDtype = Literal["fp32", "fp16", "bf16"]

_HALF_STEPS: dict[ScaleDtype, tuple[torch.dtype, float, float]] = {
    "fp16": (torch.float16, 2.0**-11, 2.0**-25),
    "bf16": (torch.bfloat16, 2.0**-8, 0.0),
}
"""Half a step of each dtype: relative to a normal value, and of those below the smallest normal
one.  With that added, rounding to nearest never falls below the value."""


def not_finite(program: ExportedProgram, layer: Layer) -> str:
    """Why a weight cannot be quantised: it holds infinities or NaN; empty when it does not."""
    weight = weight_value(program, behind_casts(layer.weight))
    if bool(weight.abs().amax().isfinite()):
        return ""
    rows = weight.flatten(1).isfinite().all(1)
    bad = int((~rows).sum())
    first = int((~rows).nonzero()[0])
    return f"{layer.name} is not finite in {bad} of {len(rows)} rows (the first is {first})"


def rounded_up(scale: Tensor, scale_dtype: ScaleDtype) -> Tensor:
    """A scale of activations as `scale_dtype` holds it: exactly, and not below its value.

    In fp16 it is no subnormal: a backend may multiply by its reciprocal, which fp16 would not hold.

    Args:
        scale: fp32.
        scale_dtype: what it is held in.

    Returns:
        fp32, shape of scale.
    """
    if scale_dtype == "fp32":
        return scale
    dtype, relative, _ = _HALF_STEPS[scale_dtype]
    smallest = torch.finfo(dtype).tiny
    return (scale * (1.0 + relative)).clamp(min=smallest).to(dtype).float()


class WeightForms:
    """Makes the quantised forms of weights; layers that share a weight share its form."""

    def __init__(self, graph: Graph, dtype: torch.dtype, scale_dtype: ScaleDtype) -> None:
        self._graph = graph
        self._dtype = dtype
        self._scale_dtype = scale_dtype
        self._made: dict[tuple[object, ...], tuple[Node, Node]] = {}

    def of(self, layer: Layer, plan: LayerPlan) -> tuple[Node, Node]:
        """Values and scale of a layer's weight, as expressions that stand before the layer.

        The values have the weight's shape; the scale is [], [N, 1] (for a conv [N, 1, ..., 1]) or,
        for blocks, [N, K / block].  They are made of the weight as it is stored: rounding it to the
        compute dtype before would be a second rounding.
        """
        weight = behind_casts(layer.weight)
        key = (weight, plan.weights, plan.block, plan.bits, layer.kind == "conv")
        if key not in self._made:
            with self._graph.inserting_before(layer.node):
                scale = self._rounded_up(self._scale(weight, layer, plan), layer)
                self._made[key] = self._values(weight, scale, layer, plan), scale
        return self._made[key]

    def _values(self, weight: Node, scale: Node, layer: Layer, plan: LayerPlan) -> Node:
        if plan.weights == "block":
            return self._insert(own.quantize_blocks.default, weight, scale, plan.bits, like=layer)
        return self._insert(own.quantize.default, weight, scale, self._dtype, like=layer)

    def _scale(self, weight: Node, layer: Layer, plan: LayerPlan) -> Node:
        if plan.weights == "block":
            return self._block_scale(weight, layer, plan)
        if plan.weights == "tensor":
            return self._insert(own.dynamic_scale.default, weight, self._dtype, False, like=layer)
        if layer.kind != "conv":
            return self._insert(own.dynamic_scale.default, weight, self._dtype, True, like=layer)
        rows = self._insert(aten.flatten.using_ints, weight, 1, like=layer)
        scale = self._insert(own.dynamic_scale.default, rows, self._dtype, True, like=layer)
        shape = shape_of(weight)
        sizes = [shape[0], *(1 for _ in shape[1:])]
        return self._insert(aten.reshape.default, scale, sizes, like=layer)

    def _block_scale(self, weight: Node, layer: Layer, plan: LayerPlan) -> Node:
        rows, columns = shape_of(weight)
        sizes = [rows, columns // plan.block, plan.block]
        blocks = self._insert(aten.reshape.default, weight, sizes, like=layer)
        scale = self._insert(own.dynamic_scale.default, blocks, torch.int8, True, like=layer)
        if plan.bits == 4:
            scale = self._insert(aten.mul.Scalar, scale, 127 / 7, like=layer)
        return self._insert(aten.squeeze.dim, scale, -1, like=layer)

    def _rounded_up(self, scale: Node, layer: Layer) -> Node:
        if self._scale_dtype == "fp32":
            return scale
        dtype, relative, least = _HALF_STEPS[self._scale_dtype]
        found = self._insert(aten.mul.Scalar, scale, 1.0 + relative, like=layer)
        found = self._insert(aten.add.Scalar, found, least, like=layer)
        for to in (dtype, torch.float32):
            found = self._insert(aten.to.dtype, found, to, like=layer)
            mark_border(found, f"a scale that {self._scale_dtype} holds exactly")
        return found

    def _insert(self, target: object, *args: object, like: Layer) -> Node:
        assert callable(target)
        node = insert(self._graph, target, args, like=like.node)
        node.meta.pop(SCALE, None)
        return node
