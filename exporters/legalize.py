"""Rewrite a program into the forms that the ops of ONNX's readers take; on a copy, right before the
conversion.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Node

import enginecast.ops  # noqa: F401 - registers enginecast::attention
from enginecast.exporters.attention_bias import full_bias, size_of, tensorrt_attention
from enginecast.exporters.legalize_blocks import separate_memory
from enginecast.exporters.readers import Reader
from enginecast.exporters.rules import apply_rules
from enginecast.passes.base import PassContext
from enginecast.passes.common_subexpressions import merge_equal
from enginecast.passes.graph_edit import (
    aten,
    dtype_of,
    first_input,
    insert,
    same_shape,
    shape_of,
    value,
)
from enginecast.passes.lift_weights import lift_weights
from enginecast.passes.sites import SiteLog


def legalize(program: ExportedProgram, *, reader: Reader = "onnxruntime-cpu") -> None:
    """Apply every rewrite of this file, in place, within blocks too."""
    attention = tensorrt_attention if reader == "tensorrt" else full_bias
    apply_rules(program, _RULES | {_attention: attention})
    lift_weights(program)
    merge_equal(program, SiteLog(PassContext()))
    separate_memory(program)


def _linear_to_matmul(program: ExportedProgram, node: Node) -> None:
    """The transposed weight is a weight expression, so it is stored transposed and costs nothing at
    run time.
    """
    graph = program.graph
    source, weight = node.args[:2]
    bias = node.args[2] if len(node.args) > 2 else None
    with graph.inserting_before(node):
        transposed = insert(graph, aten.t.default, (weight,), like=node)
        result = insert(graph, aten.matmul.default, (source, transposed), like=node)
        if bias is not None:
            result = insert(graph, aten.add.Tensor, (result, bias), like=node)
    node.replace_all_uses_with(result)
    graph.erase_node(node)


def _one_dtype(program: ExportedProgram, node: Node) -> None:
    """torch multiplies an fp16 value by an fp32 weight; ONNX wants both in the dtype that the
    program says of the result.
    """
    wanted = value(node).dtype
    with program.graph.inserting_before(node):
        for index in (0, 2):
            source = node.args[index] if index < len(node.args) else None
            if isinstance(source, Node) and dtype_of(source) != wanted:
                cast = insert(program.graph, aten.to.dtype, (source, wanted), like=node)
                node.update_arg(index, cast)


def _group_norm(program: ExportedProgram, node: Node) -> None:
    """ONNX defines GroupNormalization by mean(x^2) - mean(x)^2, and ONNX Runtime's CPU provider
    runs that definition: where a group's mean is large it loses most digits.  LayerNormalization
    subtracts the mean first, so each group becomes a row of it.
    """
    source, groups = first_input(node), node.args[1]
    weight, bias, epsilon = (*node.args[2:5], *(None, None, 1e-5)[len(node.args) - 2 :])[:3]
    sizes = shape_of(source)
    with program.graph.inserting_before(node):
        shape = [size_of(program, source, dim, node) for dim in range(len(sizes))]
        rows = insert(
            program.graph, aten.reshape.default, (source, [shape[0], groups, -1]), like=node
        )
        width = size_of(program, rows, 2, node)
        normed = insert(
            program.graph, aten.layer_norm.default, (rows, [width], None, None, epsilon), like=node
        )
        result = insert(program.graph, aten.reshape.default, (normed, shape), like=node)
        for op, factor in ((aten.mul.Tensor, weight), (aten.add.Tensor, bias)):
            if factor is not None:
                channels = [sizes[1], *[1] * (len(sizes) - 2)]
                wide = insert(program.graph, aten.reshape.default, (factor, channels), like=node)
                result = insert(program.graph, op, (result, wide), like=node)
    node.replace_all_uses_with(result)
    program.graph.erase_node(node)


def _promoted(program: ExportedProgram, node: Node) -> None:
    """1.0 - mask of integers: torch.onnx looks for a subtraction of both dtypes and finds none."""
    source, wanted = first_input(node), value(node).dtype
    if dtype_of(source) == wanted:
        return
    with program.graph.inserting_before(node):
        cast = insert(program.graph, aten.to.dtype, (source, wanted), like=node)
    node.update_arg(0, cast)


def _complex_unsqueeze(program: ExportedProgram, node: Node) -> None:
    """torch.onnx holds a complex value as pairs of real ones, and has no unsqueeze of them."""
    if not value(node).dtype.is_complex:
        return
    source, dim = first_input(node), int(node.args[1])  # type: ignore[arg-type]
    with program.graph.inserting_before(node):
        pairs = insert(program.graph, aten.view_as_real.default, (source,), like=node)
        place = dim if dim >= 0 else dim - 1  # the pair is the last dimension
        wide = insert(program.graph, aten.unsqueeze.default, (pairs, place), like=node)
        result = insert(program.graph, aten.view_as_complex.default, (wide,), like=node)
    node.replace_all_uses_with(result)
    program.graph.erase_node(node)


def _all_dims(program: ExportedProgram, node: Node) -> None:
    """The largest of all elements: torch.onnx wants the dimensions named."""
    if len(node.args) == 1 and shape_of(first_input(node)):
        node.args = (first_input(node), list(range(len(shape_of(first_input(node))))))


def _wide_einsum(program: ExportedProgram, node: Node) -> None:
    """ONNX's Einsum (opset 12) takes no bfloat16."""
    if value(node).dtype != torch.bfloat16:
        return
    graph, operands = program.graph, node.args[1]
    assert isinstance(operands, list | tuple)
    with graph.inserting_before(node):
        wide = [insert(graph, aten.to.dtype, (x, torch.float32), like=node) for x in operands]
        result = insert(graph, aten.einsum.default, (node.args[0], wide), like=node)
        narrow = insert(graph, aten.to.dtype, (result, torch.bfloat16), like=node)
    node.replace_all_uses_with(narrow)
    graph.erase_node(node)


def _select_by_index(program: ExportedProgram, node: Node) -> None:
    """masked_select has no ONNX form, and a mask as an index has; the new size keeps its name."""
    source, mask = node.args[:2]
    assert isinstance(source, Node)
    assert isinstance(mask, Node)
    if same_shape(shape_of(source), shape_of(mask)):
        node.target, node.args = aten.index.Tensor, (source, [mask])


_attention = torch.ops.enginecast.attention.default
_RULES: dict[Any, Callable[[ExportedProgram, Node], None]] = {
    aten.einsum.default: _wide_einsum,
    aten.linear.default: _linear_to_matmul,
    aten.rms_norm.default: _one_dtype,
    aten.group_norm.default: _group_norm,
    aten.rsub.Scalar: _promoted,
    aten.unsqueeze.default: _complex_unsqueeze,
    aten.amax.default: _all_dims,
    aten.amin.default: _all_dims,
    aten.masked_select.default: _select_by_index,
}
