"""Programs with quantized layers, made by hand: shared by the tests of what comes after the passes.

One scale for each row of a weight, and for a row of what a linear reads where it is not static.
"""

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import Node

from enginecast.passes.ir.edit import (
    add_weight,
    drop_unused_weights,
    dtype_of,
    erase_dead,
    first_input,
    free_name,
    insert,
    shape_of,
    structural_copy,
    tracked_outputs,
    value,
)
from enginecast.passes.ir.interpret import interpret
from enginecast.passes.quantize.measure.quantizable import Layer, find_layers

Form = Literal["storage", "static", "tensor", "row", "blocks", "activation blocks"]
ours = torch.ops.enginecast
FP8 = torch.float8_e4m3fn
BLOCK = 16


def quantized(
    program: ExportedProgram,
    form: Form,
    dtype: torch.dtype = torch.int8,
    *,
    bits: int = 8,
    largest: float = 8.0,
    factor: float = 1.0,
    kinds: tuple[str, ...] = ("linear", "embedding", "conv"),
) -> ExportedProgram:
    """A copy with every layer quantized; embeddings and convolutions are stored whatever the form.

    Args:
        form: "storage" stores weights; "static", "tensor" and "row" quantize what linears read as
            well; the last two are `blockwise_linear`.
        dtype: quantized dtype of weights and activations.
        bits: of the weights of a `blockwise_linear`.
        largest: what a static scale is made for.
        factor: of the scales that values are multiplied with in the end: 1 is right.
    """
    program = structural_copy(program)
    made: dict[Any, Node] = {}
    with tracked_outputs(program):
        for layer in find_layers(program):
            if layer.kind not in kinds:
                continue
            with program.graph.inserting_before(layer.node):
                edit = _linear if layer.kind == "linear" else _stored
                edit(_Layer(program, layer, dtype, factor, made), form, bits, largest)
    erase_dead(program.graph)
    drop_unused_weights(program)
    return program


class _Layer:
    """A layer and the nodes that it is replaced by."""

    def __init__(
        self,
        program: ExportedProgram,
        layer: Layer,
        dtype: torch.dtype,
        factor: float,
        made: dict[Any, Node],
    ) -> None:
        self.program, self.layer, self.dtype = program, layer, dtype
        self.factor, self.made = factor, made
        found = dtype_of(layer.node)
        assert found is not None
        self.computed = found

    def add(self, target: Callable[..., Any], *args: Any) -> Node:
        return insert(self.program.graph, target, args, like=self.layer.node)

    def constant(self, name: str, tensor: Tensor) -> Node:
        name = free_name(self.program, name)
        return add_weight(self.program, name, tensor, InputKind.CONSTANT_TENSOR)

    def weight(self, *, multiplied: bool = False) -> tuple[Node, Node]:
        """The quantized weight and its scale for each row; one that is multiplied in int8 has 7
        bits, whose sums are exact on every CPU.
        """
        source = self.layer.weight
        flat = self.add(torch.ops.aten.flatten.using_ints, source, 1)
        scale = self.add(ours.dynamic_scale.default, flat, self.dtype, True)
        if multiplied and self.dtype == torch.int8:
            scale = self.add(torch.ops.aten.mul.Scalar, scale, 127 / 63)
        if value(source).dim() > 2:
            ones = [1] * (value(source).dim() - 1)
            scale = self.add(torch.ops.aten.reshape.default, scale, [-1, *ones])
        found = self.add(ours.quantize.default, source, scale, self.dtype)
        return found, self.add(torch.ops.aten.mul.Tensor, scale, self.factor)

    def done(self, result: Node) -> None:
        self.layer.node.replace_all_uses_with(result)
        self.program.graph.erase_node(self.layer.node)


def _stored(layer: _Layer, form: Form, bits: int, largest: float) -> None:
    node = layer.layer.node
    weight, scale = layer.weight()
    if layer.layer.kind == "embedding":
        table = [node.target, node.args[1]]
        rows = layer.add(node.target, weight, *table[1:])  # type: ignore[arg-type]
        scales = layer.add(node.target, scale, *table[1:])  # type: ignore[arg-type]
        layer.done(layer.add(ours.dequantize.default, rows, scales, layer.computed))
        return
    wide = layer.add(ours.dequantize.default, weight, scale, layer.computed)
    layer.done(layer.add(node.target, node.args[0], wide, *node.args[2:]))  # type: ignore[arg-type]


def _linear(layer: _Layer, form: Form, bits: int, largest: float) -> None:
    if form == "storage":
        _stored(layer, form, bits, largest)
        return
    node = layer.layer.node
    source = first_input(node)
    bias = node.args[2] if len(node.args) > 2 else None
    if "blocks" in form:
        both = form == "activation blocks"
        packed = _packed(layer, bits)
        form_of = ours.blockwise_linear.default
        layer.done(layer.add(form_of, source, *packed, bias, bits, both))
        return
    weight, weight_scale = layer.weight(multiplied=True)
    scale, read = _activation(layer, source, form, largest)
    layer.done(
        layer.add(
            ours.quantized_linear.default, read, scale, weight, weight_scale, bias, layer.computed
        )
    )


def _packed(layer: _Layer, bits: int) -> tuple[Node, Node]:
    """The weight rounded by blocks, and their scales."""
    weight = layer.layer.weight
    rows, size = shape_of(weight)
    aten = torch.ops.aten
    blocks = layer.add(aten.reshape.default, weight, [rows, size // BLOCK, BLOCK])
    largest = layer.add(aten.amax.default, layer.add(aten.abs.default, blocks), [-1])
    scale = layer.add(aten.div.Tensor, largest, 2.0 ** (bits - 1) - 1)
    found = layer.add(ours.quantize_blocks.default, weight, scale, bits)
    return found, layer.add(aten.mul.Tensor, scale, layer.factor)


def _activation(layer: _Layer, source: Node, form: Form, largest: float) -> tuple[Node, Node]:
    """One for all linears that read a value."""
    if source not in layer.made:
        if form == "static":
            limit = 448.0 if layer.dtype == FP8 else 127.0
            scale = layer.constant("static_scale", torch.tensor(largest / limit))
        else:
            scale = layer.add(ours.dynamic_scale.default, source, layer.dtype, form == "row")
        read = layer.add(ours.quantize.default, source, scale, layer.dtype)
        layer.made[source] = read
    read = layer.made[source]
    found = read.args[1]
    assert isinstance(found, Node)
    return found, read


def in_torch(program: ExportedProgram, *inputs: Tensor) -> tuple[Tensor, ...]:
    """What a program returns when it is run node by node."""
    names = program.graph_signature.user_inputs
    return tuple(interpret(program, dict(zip(names, inputs, strict=True))).values())
