"""Rewrite quantised values into the forms that a reader of ONNX runs well, before `legalize`.

quantized_linear, int8     integer_linear of a transposed weight; on the CPU of unsigned values
quantized_linear, fp8      dequantised values in a matmul, or fp8_gemm where that is asked for
blockwise_linear           packed_linear
dequantised weight         dequantize_axis, transposed before and not after
embedding of fp8           embedding of bytes, then a table of what the 256 of them stand for; for
                           TensorRT of the dequantised table
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import Node

import enginecast.exporters.quantized_forms  # noqa: F401 - registers the ops
from enginecast.errors import LoweringError
from enginecast.exporters.quantized_rewriting import Rewriting
from enginecast.exporters.readers import Reader
from enginecast.exporters.tensorrt_quantized import refuse_unfit, table_of
from enginecast.passes.graph_edit import (
    add_weight,
    aten,
    dtype_of,
    free_name,
    shape_of,
    tracked_outputs,
    weight_expressions,
)
from enginecast.passes.source import module_path, source_line
from enginecast.passes.structure import all_nodes

OLDEST_OPSET = 21
"""The first whose QuantizeLinear says its dtype without a zero point, and knows blocks; casts to
fp8 came with 19."""

ours = torch.ops.enginecast
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_QUANTISED = (*_FP8, torch.int8)
_OPS = (
    ours.dynamic_scale.default,
    ours.quantize.default,
    ours.dequantize.default,
    ours.quantized_linear.default,
    ours.blockwise_linear.default,
)


def legalize_quantized(
    program: ExportedProgram, *, reader: Reader, opset: int, gemm_float8: bool = False
) -> None:
    """Apply every rewrite of this file, in place.

    Args:
        program: a structural copy.
        reader: decides how integers are multiplied.
        opset: of ONNX's own domain.
        gemm_float8: multiply fp8 by com.microsoft GemmFloat8, which only ONNX Runtime's CUDA
            provider has, on a GPU with fp8 units.

    Raises:
        LoweringError: a quantised program in an opset that is too old, in bf16, or of a dtype that
            the reader has no kernels for; GemmFloat8 for anything but CUDA; scales that TensorRT
            would have to hold in another dtype.
    """
    weights = weight_expressions(program)
    found = [n for n in all_nodes(program) if n.target in _OPS and n not in weights]
    if not found:
        return
    if opset < OLDEST_OPSET:
        raise LoweringError(
            f"quantised values need an opset of {OLDEST_OPSET} or newer, got {opset}",
            hint="Older ones have no QuantizeLinear for them, and ONNX Runtime refuses the file.",
        )
    if gemm_float8 and reader != "onnxruntime-cuda":
        raise LoweringError(
            "GemmFloat8: ONNX Runtime has it on CUDA alone, and the engine is for"
            f" {'TensorRT' if reader == 'tensorrt' else 'the CPU'}",
            hint="Leave it out: others multiply what QuantizeLinear and DequantizeLinear give.",
        )
    for node in found:
        if reader == "tensorrt":
            refuse_unfit(node, weights)
        else:
            _refuse_dtypes(node)
    rewriting = Rewriting(program, reader, gemm_float8, weights)
    with tracked_outputs(program):
        for node in found:
            rule = _RULES.get(node.target)
            if rule is not None and node.graph is program.graph:
                with program.graph.inserting_before(node):
                    rule(rewriting, node)


def _refuse_dtypes(node: Node) -> None:
    place = f"{node.target} (module '{module_path(node)}', {source_line(node) or 'no source line'})"
    dtypes = {dtype_of(found) for found in (node, *node.all_input_nodes)}
    if torch.bfloat16 in dtypes:
        raise LoweringError(
            f"ONNX Runtime has no kernels that quantise bfloat16, for {place}",
            hint="Export in fp16 (or fp32): quantised, both have the range.",
        )
    other = [str(found) for found in dtypes if found is not None and _is_other_fp8(found)]
    if other:
        raise LoweringError(
            f"ONNX Runtime has no kernels for {other[0].removeprefix('torch.')}, for {place}",
            hint="Plan for an architecture whose fp8 is e4m3fn.",
        )


def _is_other_fp8(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and dtype.itemsize == 1 and dtype not in _FP8


def _flat(rewriting: Rewriting, scale: Node, like: Node) -> Node:
    """[N, 1] and the like as [N], one number as []."""
    sizes = shape_of(scale)
    single = all(size == 1 for size in sizes)
    if not sizes or (len(sizes) == 1 and not single):
        return scale
    return rewriting.add(aten.reshape.default, scale, [] if single else [-1], like=like)


def _scale_of_values(rewriting: Rewriting, scale: Node, like: Node) -> Node:
    """One scale for all is of no dimension: so the translations know it."""
    single = scale in rewriting.weights and all(size == 1 for size in shape_of(scale))
    return _flat(rewriting, scale, like) if single else scale


def _quantize(rewriting: Rewriting, node: Node) -> None:
    source, scale, dtype = node.args
    assert isinstance(source, Node)
    assert isinstance(scale, Node)
    assert isinstance(dtype, torch.dtype)
    if dtype not in _QUANTISED:
        raise LoweringError(
            f"enginecast.quantize to {dtype}: a program that rounds nothing is no engine",
            hint="It is for verification; lower the program that it was made from.",
        )
    wanted = dtype_of(source)
    assert wanted is not None
    scale = _scale_of_values(rewriting, scale, node)
    if dtype != torch.int8:
        scale = rewriting.scale(scale, wanted, node)
    node.args = (source, scale, dtype)
    readers = [user for user in node.users if user.target is ours.quantized_linear.default]
    if dtype == torch.int8 and rewriting.reader == "onnxruntime-cpu" and readers:
        unsigned = rewriting.add(ours.quantize_unsigned.default, source, scale, like=node)
        for user in readers:
            user.replace_input_with(node, unsigned)
        if not node.users:
            node.graph.erase_node(node)


def _dequantize(rewriting: Rewriting, node: Node) -> None:
    source, scale, dtype = node.args
    assert isinstance(source, Node)
    assert isinstance(scale, Node)
    assert isinstance(dtype, torch.dtype)
    if source in rewriting.weights and scale in rewriting.weights:
        _dequantize_weight(rewriting, node, source, scale, dtype)
        return
    if rewriting.reader == "tensorrt" and (found := table_of(rewriting, node, dtype)) is not None:
        rewriting.replace(node, found)
        return
    scale = _scale_of_values(rewriting, scale, node)
    if source.target is aten.embedding.default and dtype_of(source) in _FP8:
        source = _rows_of_bytes(rewriting, source, node)
    node.args = (source, rewriting.scale(scale, dtype, node), dtype)


def _dequantize_weight(
    rewriting: Rewriting, node: Node, source: Node, scale: Node, dtype: torch.dtype
) -> None:
    axis = _axis(shape_of(source), shape_of(scale))
    if axis is None:
        return
    linears = [u for u in node.users if u.target is aten.linear.default and u.args[1] is node]
    flat = rewriting.scale(_flat(rewriting, scale, node), dtype, node)
    if linears:
        turned = rewriting.add(aten.t.default, source, like=node)
        wide = rewriting.add(ours.dequantize_axis.default, turned, flat, 1 - axis, dtype, like=node)
        for linear in linears:
            _matmul(rewriting, linear, wide)
    if node.users:
        wide = rewriting.add(ours.dequantize_axis.default, source, flat, axis, dtype, like=node)
        node.replace_all_uses_with(wide)
    node.graph.erase_node(node)


def _axis(sizes: tuple[Any, ...], scales: tuple[Any, ...]) -> int | None:
    """The one dimension along which scales differ; 0 where none does, None where several do."""
    offset = len(sizes) - len(scales)
    wide = [offset + index for index, size in enumerate(scales) if size != 1]
    return (wide or [0])[0] if len(wide) < 2 else None


def _matmul(rewriting: Rewriting, linear: Node, weight: Node) -> None:
    bias = linear.args[2] if len(linear.args) > 2 else None
    with linear.graph.inserting_before(linear):
        result = rewriting.add(aten.matmul.default, linear.args[0], weight, like=linear)
        if bias is not None:
            result = rewriting.add(aten.add.Tensor, result, bias, like=linear)
    rewriting.replace(linear, result)


def _rows_of_bytes(rewriting: Rewriting, rows: Node, like: Node) -> Node:
    """ONNX Runtime's Gather takes no fp8, and does take bytes."""
    table, indices = rows.args[:2]
    assert isinstance(table, Node)
    dtype = dtype_of(rows)
    assert dtype is not None
    raw = rewriting.once(aten.view.dtype, table, torch.uint8, like=like)
    found = rewriting.add(aten.embedding.default, raw, indices, like=like)
    key = (dtype,)
    if key not in rewriting.made:
        values = torch.arange(256, dtype=torch.uint8).view(dtype).float()
        name = free_name(rewriting.program, f"values_of_{str(dtype).removeprefix('torch.')}")
        kind = InputKind.CONSTANT_TENSOR
        rewriting.made[key] = add_weight(rewriting.program, name, values, kind)
    return rewriting.add(ours.values_of_bytes.default, found, rewriting.made[key], like=like)


def _quantized_linear(rewriting: Rewriting, node: Node) -> None:
    source, scale, weight, weight_scale, bias, dtype = node.args
    assert isinstance(source, Node)
    assert isinstance(scale, Node)
    assert isinstance(weight, Node)
    assert isinstance(weight_scale, Node)
    assert isinstance(dtype, torch.dtype)
    scale = _scale_of_values(rewriting, scale, node)
    flat = _flat(rewriting, weight_scale, node)
    wide_bias = rewriting.cast(bias, torch.float32, node) if isinstance(bias, Node) else None
    values = (source, scale)
    if dtype_of(weight) == torch.int8:
        turned = rewriting.add(aten.t.default, weight, like=node)
        form = ours.integer_linear.default
        result = rewriting.add(form, *values, turned, flat, wide_bias, dtype, like=node)
    elif rewriting.gemm_float8:
        form = ours.fp8_gemm.default
        result = rewriting.add(form, *values, weight, flat, wide_bias, dtype, like=node)
    else:
        result = _of_dequantised(rewriting, node, values, (weight, flat), dtype)
        if isinstance(bias, Node):
            bias = rewriting.cast(bias, dtype, node)
            result = rewriting.add(aten.add.Tensor, result, bias, like=node)
    rewriting.replace(node, result)


def _of_dequantised(
    rewriting: Rewriting,
    node: Node,
    values: tuple[Node, Node],
    weight: tuple[Node, Node],
    dtype: torch.dtype,
) -> Node:
    turned = rewriting.add(aten.t.default, weight[0], like=node)
    scales = rewriting.scale(weight[1], dtype, node)
    form = ours.dequantize_axis.default
    wide_weight = rewriting.add(form, turned, scales, 1, dtype, like=node)
    scale = rewriting.scale(values[1], dtype, node)
    wide = rewriting.once(ours.dequantize.default, values[0], scale, dtype, like=node)
    return rewriting.add(aten.matmul.default, wide, wide_weight, like=node)


def _blockwise_linear(rewriting: Rewriting, node: Node) -> None:
    """MatMulNBits wants scales in the dtype of x; where that does not hold them, x is cast."""
    source, weight, scale, bias, bits, activations = node.args
    assert isinstance(source, Node)
    assert isinstance(weight, Node)
    assert isinstance(scale, Node)
    dtype = dtype_of(source)
    assert dtype is not None
    block = shape_of(weight)[1] // shape_of(scale)[1]
    packed = rewriting.add(ours.pack_blocks.default, weight, block, bits, like=node)
    scales = rewriting.scale(scale, dtype, node)
    computed = dtype_of(scales)
    assert computed is not None
    source = rewriting.cast(source, computed, node)
    bias = rewriting.cast(bias, computed, node) if isinstance(bias, Node) else None
    form = ours.packed_linear.default
    result = rewriting.add(form, source, packed, scales, bias, bits, activations, like=node)
    rewriting.replace(node, rewriting.cast(result, dtype, node))


_RULES: dict[Any, Callable[[Rewriting, Node], None]] = {
    ours.quantize.default: _quantize,
    ours.dequantize.default: _dequantize,
    ours.quantized_linear.default: _quantized_linear,
    ours.blockwise_linear.default: _blockwise_linear,
}
