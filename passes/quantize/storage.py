"""Weights as quantized values with their scales, and the layers that read them so."""

from collections.abc import Iterable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import Node

from enginecast.errors import PassError
from enginecast.ops.quantize import E2M1, E8M0, LIMITS
from enginecast.passes.ir.edit import (
    SCALE,
    add_weight,
    arguments,
    aten,
    dtype_of,
    free_name,
    insert,
    shape_of,
)
from enginecast.passes.ir.effects import own
from enginecast.passes.ir.match import behind_casts
from enginecast.passes.ir.quantization_plan import LayerPlan
from enginecast.passes.precision.cast_borders import mark_border
from enginecast.passes.quantize.measure.given_scales import given_scale
from enginecast.passes.quantize.measure.quantizable import Layer

ScaleDtype = Literal["fp32", "fp16", "bf16"]
Chosen = tuple[Layer, LayerPlan]

HALF_STEPS: dict[ScaleDtype, tuple[torch.dtype, float, float]] = {
    "fp16": (torch.float16, 2.0**-11, 2.0**-25),
    "bf16": (torch.bfloat16, 2.0**-8, 0.0),
}
"""Half a step of each dtype: relative to a normal value, and of those below the smallest normal
one.  With that added, rounding to nearest never falls below the value."""

_LEAST_E4M3 = 2.0**-9
"""Above zero."""


def change(node: Node, target: Any, args: Iterable[Any]) -> None:
    """Let a node call another op; it stays the same node, with its name."""
    node.target, node.args, node.kwargs = target, tuple(args), {}


class Weights:
    """Makes quantized weights, as expressions at the insertion point.

    Args:
        scale_dtype: holds every scale exactly; but for those that are given.
        scales: those that are given, by the name of the weight.
    """

    def __init__(
        self,
        program: ExportedProgram,
        dtype: torch.dtype,
        scale_dtype: ScaleDtype,
        scales: Mapping[str, Tensor] = MappingProxyType({}),
    ) -> None:
        self.dtype = dtype
        self.scale_dtype = scale_dtype
        self._program = program
        self._scales = scales
        self._known: dict[tuple[object, ...], tuple[Node, Node]] = {}

    def insert(self, layer: Layer, target: Any, *args: object) -> Node:
        node = insert(self._program.graph, target, args, like=layer.node)
        node.meta.pop(SCALE, None)  # a scale carries the power of two, if there is one
        return node

    def of(self, layer: Layer, plan: LayerPlan) -> tuple[Node, Node]:
        """Values and scale of a layer's weight, as expressions that stand before the layer; layers
        that share a weight share them.

        The values have the weight's shape; the scale is [], [N, 1] (for a conv [N, 1, ..., 1]) or,
        for blocks, [N, K / block].  They are made of the weight as it is stored: rounding it to the
        compute dtype before would be a second rounding.
        """
        weight = behind_casts(layer.weight)
        key = (weight, plan.weights, plan.block, plan.bits, plan.signed, layer.kind)
        if key not in self._known:
            with self._program.graph.inserting_before(layer.node):
                if plan.weights == "block" and self.dtype != torch.int8:
                    self._known[key] = self._blocks_of_floats(layer, plan, weight)
                    return self._known[key]
                scale = self._given(layer) if plan.given else self.scale(layer, plan, weight)
                op = own.quantize_blocks if plan.weights == "block" else own.quantize
                how = plan.bits if plan.weights == "block" else self.dtype
                self._known[key] = self.insert(layer, op.default, weight, scale, how), scale
        return self._known[key]

    def _given(self, layer: Layer) -> Node:
        scale = given_scale(self._program, layer, self._scales, self.dtype)
        if scale is None:
            raise PassError(
                f"the plan keeps {layer.name} as its checkpoint has it, and no such scale is given",
                hint="Use --keep-quantized, and no --plan.",
            )
        name = free_name(self._program, f"{layer.name}_scale")
        return add_weight(self._program, name, scale, InputKind.BUFFER)

    def widened(self, layer: Layer, plan: LayerPlan, values: Node, scale: Node) -> Node:
        """A stored weight, or rows of one, in the dtype of its layer.

        A given scale that the backend would have to round multiplies in fp32.
        """
        dtype = dtype_of(layer.weight)
        if not plan.given or self.scale_dtype == "fp32":
            return self.insert(layer, own.dequantize.default, values, scale, dtype)
        wide = self.insert(layer, own.dequantize.default, values, scale, torch.float32)
        cast = self.insert(layer, aten.to.dtype, wide, dtype)
        mark_border(cast, f"a scale of the checkpoint, which {self.scale_dtype} may not hold")
        return cast

    def _blocks_of_floats(self, layer: Layer, plan: LayerPlan, weight: Node) -> tuple[Node, Node]:
        """Values and scales by blocks, where a scale is quantized itself.

        NVFP4 has E2M1 values, fp8 scales and a number that these are over.  That number is a power
        of two here, with which every product of the three is exact in fp16 and bf16, too: a larger
        one than is needed costs nothing, since fp8 is as fine at any size.  In fp16 it is normal.

        MXFP8 has e4m3 values and scales that are powers of two (OCP Microscaling Formats (MX)
        Specification v1.0).  They are rounded up, as in https://arxiv.org/abs/2506.08027: rounded
        down, as by the method in the specification, the largest values of every fifth block
        saturate.
        """
        add = partial(self.insert, layer)
        rows, size = shape_of(weight)
        blocks = add(aten.reshape.default, weight, [rows, size // plan.block, plan.block])
        dtype = E2M1 if plan.bits == 4 else self.dtype
        wanted = add(own.dynamic_scale.default, blocks, dtype, True)
        outer = add(aten.amax.default, wanted)
        if plan.bits == 4:
            outer = add(aten.div.Scalar, outer, LIMITS[torch.float8_e4m3fn])
            outer = add(own.power_of_two.default, outer)
            outer = add(aten.clamp_min.default, outer, torch.finfo(torch.float16).tiny)
            least = add(aten.mul.Scalar, outer, _LEAST_E4M3)
            wanted = add(aten.maximum.default, wanted, least)
            inner = add(own.quantize.default, wanted, outer, torch.float8_e4m3fn)
        else:
            outer = add(aten.ones_like.default, outer)
            wanted = add(own.power_of_two.default, wanted)
            inner = add(own.quantize.default, wanted, outer, E8M0)
        # What values are divided by is computed with them; what they are multiplied with is not.
        scale = add(aten.mul.Tensor, add(aten.to.dtype, inner, torch.float32), outer)
        values = add(own.quantize.default, blocks, scale, dtype)
        inner = add(aten.squeeze.dim, inner, -1)
        scale = add(own.dequantize.default, inner, outer, torch.float32)
        return add(aten.flatten.using_ints, values, 1), scale

    def matrix(self, layer: Layer, weight: Node, plan: LayerPlan) -> tuple[Node, Node]:
        """A weight [N, K] by rows, and its scales [N, 1]."""
        whole = behind_casts(weight)
        scale = self._rounded_up(layer, self._scale_of(layer, whole, plan, by_row=True))
        return self.insert(layer, own.quantize.default, whole, scale, self.dtype), scale

    def scale(self, layer: Layer, plan: LayerPlan, weight: Node) -> Node:
        """The scale of a layer's weight, [out, in, kernel...] of any convolution."""
        shape = shape_of(weight)
        if plan.weights == "block":
            sizes = [shape[0], shape[1] // plan.block, plan.block]
            blocks = self.insert(layer, aten.reshape.default, weight, sizes)
            scale = self.insert(layer, own.dynamic_scale.default, blocks, torch.int8, True)
            scale = self._coarser(layer, scale, plan)
            scale = self.insert(layer, aten.squeeze.dim, scale, -1)
        elif plan.weights == "tensor" or not layer.kind.startswith("conv"):
            scale = self._scale_of(layer, weight, plan, by_row=plan.weights == "row")
        else:
            axis = 1 if plan.signed and layer.kind == "conv-transpose" else 0
            rows = self.insert(layer, aten.transpose.int, weight, 0, 1) if axis else weight
            rows = self.insert(layer, aten.flatten.using_ints, rows, 1)
            scale = self.insert(layer, own.dynamic_scale.default, rows, self.dtype, True)
            scale = self._coarser(layer, scale, plan)
            sizes = [size if at == axis else 1 for at, size in enumerate(shape)]
            scale = self.insert(layer, aten.reshape.default, scale, sizes)
        return self._rounded_up(layer, scale)

    def _scale_of(self, layer: Layer, weight: Node, plan: LayerPlan, *, by_row: bool) -> Node:
        """The scale of a matrix [N, K]; of 7 bits, for the sums of two neighbors along K, of those
        above zero and of those below: what they are multiplied with is added in 16 bits.
        """
        if plan.bits == 7:
            if shape_of(weight)[1] % 2:
                weight = self.insert(layer, aten.constant_pad_nd.default, weight, [0, 1])
            pairs = self.insert(layer, aten.unflatten.int, weight, 1, [-1, 2])
            sums = []
            for side in (pairs, self.insert(layer, aten.neg.default, pairs)):
                above = self.insert(layer, aten.relu.default, side)
                sums.append(self.insert(layer, aten.sum.dim_IntList, above, [-1]))
            weight = self.insert(layer, aten.cat.default, sums, 1)
        return self.insert(layer, own.dynamic_scale.default, weight, self.dtype, by_row)

    def _coarser(self, layer: Layer, scale: Node, plan: LayerPlan) -> Node:
        """The scale of an int8 weight, with which its largest value takes the bits of the plan."""
        if plan.bits == 8:
            return scale
        steps = LIMITS[torch.int8] / (2 ** (plan.bits - 1) - 1)
        return self.insert(layer, aten.mul.Scalar, scale, steps)

    def _rounded_up(self, layer: Layer, scale: Node) -> Node:
        if self.scale_dtype == "fp32":
            return scale
        dtype, relative, least = HALF_STEPS[self.scale_dtype]
        scale = self.insert(layer, aten.mul.Scalar, scale, 1.0 + relative)
        scale = self.insert(layer, aten.add.Scalar, scale, least)
        for to in (dtype, torch.float32):
            scale = self.insert(layer, aten.to.dtype, scale, to)
            mark_border(scale, f"a scale that {self.scale_dtype} holds exactly")
        return scale


def quantize_weight(
    program: ExportedProgram, weights: Weights, layer: Layer, plan: LayerPlan
) -> None:
    """Let a layer read a stored weight; a linear of blocks may round its input, too."""
    node, dtype = layer.node, dtype_of(layer.weight)
    values, scale = weights.of(layer, plan)
    with program.graph.inserting_before(node):
        if layer.kind == "embedding":
            _, ids, *_ = node.args
            rows = weights.insert(layer, aten.embedding.default, values, *node.args[1:])
            if shape_of(scale):
                scale = weights.insert(layer, aten.embedding.default, scale, ids)
            if plan.weights != "block":
                wide = weights.widened(layer, plan, rows, scale)
                change(node, wide.target, wide.args)
                return
            blocks = weights.insert(layer, aten.unflatten.int, rows, -1, [-1, plan.block])
            scale = weights.insert(layer, aten.unsqueeze.default, scale, -1)
            whole = weights.insert(layer, own.dequantize.default, blocks, scale, dtype)
            change(node, aten.flatten.using_ints, (whole, -2))
        elif plan.weights == "block":
            x, _, *bias = arguments(node)
            rounds = plan.activations is not None
            args = (x, values, scale, bias[0] if bias else None, plan.bits, rounds)
            change(node, own.blockwise_linear.default, args)
        else:
            node.update_arg(1, weights.widened(layer, plan, values, scale))
