"""Rewrite quantized values into the forms that a reader of ONNX runs well.

    quantized_linear, int8     integer_linear of a transposed weight; on the CPU of unsigned values
    quantized_linear, fp8      dequantized values in a matmul, or fp8_gemm where that is asked for
    blockwise_linear           packed_linear; for TensorRT dequantized blocks in a matmul
    quantized_conv             one scale for all that it gives
    dequantized weight         dequantize_axis, transposed before and not after
    embedding of fp8           embedding of bytes, then a table of what the 256 of them stand for

    before:  %y = enginecast.quantized_linear(%q, %s, %w, %ws, %b, f32)
    after:   %t = aten.t.default(%w)
             %r = aten.reshape.default(%ws, [-1])
             %y = enginecast.integer_linear(%q, %s, %t, %r, %b, f32)

Promises `reordered`: integers are multiplied exactly as before; what is dequantized before it is
multiplied is rounded to the dtype of the result, which holds it many times finer than fp8 does.

TensorRT's form of ONNX: QuantizeLinear and DequantizeLinear around a MatMul or a convolution, fp8
as e4m3fn or int8, one static scale for what is read and one for each row of a weight, each in the
dtype of the value and above zero; weights with a scale for each block along K: int4, E2M1 with
scales that are dequantized from fp8 themselves (NVFP4), and e4m3 with powers of two (MXFP8, by an
operator of the parser's own).  Source: NVIDIA's guide "Working with Quantized Types" (TensorRT
10.11 and 11.0); onnx/onnx-tensorrt, QuantDequantLinearHelper (scales above zero; no UINT8) and
docs/operators.md (FP8 comes of quantization alone: neither Cast nor Gather takes it); and what
TensorRT-RTX 1.7.1 parses and builds.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import Node

from enginecast.errors import LoweringError
from enginecast.exporters.onnx.ops.registry import Reader
from enginecast.ops.quantize import E8M0, ZERO
from enginecast.passes.ir.base import Pass, PassContext, Promise, Site
from enginecast.passes.ir.blocks import all_nodes
from enginecast.passes.ir.edit import (
    add_weight,
    arguments,
    aten,
    dtype_of,
    free_name,
    insert,
    shape_of,
    weight_expressions,
    weight_value,
)
from enginecast.passes.ir.effects import is_pure
from enginecast.passes.ir.sites import SiteLog
from enginecast.passes.ir.source import call_place

ours = torch.ops.enginecast
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_QUANTIZED = (*_FP8, torch.int8)
_OPS = (
    ours.dynamic_scale.default,
    ours.quantize.default,
    ours.dequantize.default,
    ours.quantized_linear.default,
    ours.blockwise_linear.default,
)


@dataclass(frozen=True)
class LegalizeQuantized(Pass):
    """Write quantized values in the ops that the ONNX runtime multiplies fast."""

    reader: Reader = "onnxruntime-cpu"
    gemm_float8: bool = False
    """Multiply fp8 by com.microsoft GemmFloat8, which only ONNX Runtime's CUDA provider has, on a
    GPU with fp8 units."""

    name: ClassVar[str] = "legalize-quantized"
    promise: ClassVar[Promise] = "reordered"

    def __post_init__(self) -> None:
        if self.gemm_float8 and self.reader != "onnxruntime-cuda":
            raise ValueError("ONNX Runtime has GemmFloat8 on CUDA alone")

    def requires(self, program: ExportedProgram) -> None:
        """Refuse what the reader cannot hold.

        Raises:
            LoweringError: a dtype that it has no kernels for; for TensorRT scales that are computed
                from values, or one for each row of what is read.
        """
        weights = weight_expressions(program)
        for node in all_nodes(program):
            if node.target not in _OPS or node in weights:
                continue
            if self.reader == "tensorrt":
                _refuse_unfit(node, weights)
            else:
                _refuse_dtypes(node)

    def run(self, program: ExportedProgram, context: PassContext) -> list[Site]:
        """
        Raises:
            LoweringError: scales that TensorRT would have to hold in another dtype.
        """
        log = SiteLog(context)
        weights = weight_expressions(program)
        rewriting = _Rewriting(program, self.reader, self.gemm_float8, weights)
        for node in list(program.graph.nodes):
            if node.target not in _RULES or node in weights or log.skipped(node):
                continue
            log.done(node)
            with program.graph.inserting_before(node):
                _RULES[node.target](rewriting, node, *node.args)
        return log.sites


@dataclass
class _Rewriting:
    """One legalization: it is handed to every rule."""

    program: ExportedProgram
    reader: Reader
    gemm_float8: bool
    weights: set[Node]
    made: dict[tuple[Any, ...], Node] = field(default_factory=dict)
    """What several nodes read in one form, by what it is made of."""

    def add(self, target: Callable[..., Any], *args: Any, like: Node) -> Node:
        """A call at the insertion point; a weight expression where all that it reads is one."""
        node = insert(self.program.graph, target, args, like=like)
        if is_pure(node) and self.weights.issuperset(node.all_input_nodes):
            self.weights.add(node)
        return node

    def once(self, target: Callable[..., Any], *args: Any, like: Node) -> Node:
        """The same call, made at its first reader; those come in graph order."""
        key = (target, *args)
        if key not in self.made:
            self.made[key] = self.add(target, *args, like=like)
        return self.made[key]

    def zeros(self, scales: Node, like: Node) -> Node:
        """What stands for 0 beside each scale: one tensor for all scales of one shape."""
        key = ("zeros", *map(str, shape_of(scales)))
        if key not in self.made:
            args, kwargs = (scales, ZERO), {"dtype": torch.uint8}
            full = aten.full_like.default
            self.made[key] = insert(self.program.graph, full, args, kwargs, like=like)
        return self.made[key]

    def replace(self, node: Node, result: Node) -> None:
        node.replace_all_uses_with(result)
        node.graph.erase_node(node)

    def cast(self, node: Node, dtype: torch.dtype, like: Node) -> Node:
        if dtype_of(node) == dtype:
            return node
        return self.add(aten.to.dtype, node, dtype, like=like)

    def scale(self, scale: Node, dtype: torch.dtype, like: Node) -> Node:
        """A constant scale in the dtype of what is scaled, where that dtype holds it to its last
        digit but one; else in fp32, or for TensorRT, which wants no other dtype, not at all.

        Raises:
            LoweringError: for TensorRT.
        """
        if dtype == torch.float32 or scale not in self.weights:
            return scale
        value = weight_value(self.program, scale)
        if self.reader == "tensorrt":
            _refuse_lost(value, dtype, like)
            return self.cast(scale, dtype, like)
        limits = torch.finfo(dtype)
        fits = bool(((value >= limits.tiny) & (value <= limits.max)).all())
        return self.cast(scale, dtype, like) if fits else scale


def _refuse_lost(scale: Tensor, dtype: torch.dtype, node: Node) -> None:
    """Whether a dtype holds a scale to its last digit but one; subnormal values may be exact."""
    held = scale.to(dtype).float()
    lost = ~(
        (held > 0) & held.isfinite() & ((held - scale).abs() <= scale * torch.finfo(dtype).eps)
    )
    if bool(lost.any()):
        raise LoweringError(
            f"the scale {float(scale[lost][0]):.3g} of {call_place(node)} does not fit"
            f" {str(dtype).removeprefix('torch.')}, in which TensorRT holds it",
            hint="fp8-matmul{scale_dtype=fp16} makes scales that do; keep the layer otherwise.",
        )


def _refuse_unfit(node: Node, weights: set[Node]) -> None:
    """
    Raises:
        LoweringError: another dtype than int8 and e4m3fn, scales computed from values, or one for
            each row of what is read.
    """
    dtypes = {dtype_of(found) for found in (node, *node.all_input_nodes)}
    others = dtypes - {torch.float8_e4m3fn, torch.int8, E8M0, torch.bool}
    for other in sorted(str(dtype) for dtype in others if dtype and dtype.itemsize == 1):
        wanted = "expected fp8 or int8"
        raise _refusal(node, f"it is quantized to {other.removeprefix('torch.')}, {wanted}")
    if node.target is ours.blockwise_linear.default:
        *_, bits, activations = arguments(node)
        if activations:
            raise _refusal(node, "it rounds blocks of what it reads, expected a weight alone")
        if bits != 4 and torch.int8 in dtypes:
            raise _refusal(node, f"its blocks have {bits} bits, expected 4")
    if node.target is ours.dynamic_scale.default:
        raise _refusal(node, "its scale is computed from each value, expected a static one")
    if node.target is ours.quantize.default:
        scale = arguments(node)[1]
        if scale not in weights or any(size != 1 for size in shape_of(scale)):
            raise _refusal(node, "it has a scale for each row, expected one for all")


def _refusal(node: Node, what: str) -> LoweringError:
    return LoweringError(
        f"TensorRT's form of ONNX has no {call_place(node)}: {what}",
        hint="Plan for it: --precision fp8 --target tensorrt, or"
        " plan-fp8{target=tensorrt arch=sm90} or plan-int8.",
    )


def _refuse_dtypes(node: Node) -> None:
    dtypes = {dtype_of(found) for found in (node, *node.all_input_nodes)}
    is_block = node.target is ours.blockwise_linear.default
    if is_block and dtype_of(arguments(node)[1]) != torch.int8:
        raise LoweringError(
            f"ONNX Runtime has no blocks of fp8, for {call_place(node)}",
            hint="They are for TensorRT: --target tensorrt-rtx.",
        )
    if torch.bfloat16 in dtypes:
        raise LoweringError(
            f"ONNX Runtime has no kernels that quantize bfloat16, for {call_place(node)}",
            hint="Export in fp16 (or fp32): quantized, both have the range.",
        )
    for dtype in dtypes - {*_FP8}:
        if dtype is not None and dtype.is_floating_point and dtype.itemsize == 1:
            raise LoweringError(
                f"ONNX Runtime has no kernels for {str(dtype).removeprefix('torch.')},"
                f" for {call_place(node)}",
                hint="Plan for an architecture whose fp8 is e4m3fn.",
            )


def _flat(rewriting: _Rewriting, scale: Node, like: Node) -> Node:
    """[N, 1] and the like as [N], one number as []."""
    sizes = shape_of(scale)
    single = all(size == 1 for size in sizes)
    if not sizes or (len(sizes) == 1 and not single):
        return scale
    return rewriting.add(aten.reshape.default, scale, [] if single else [-1], like=like)


def _scale_of_values(rewriting: _Rewriting, scale: Node, like: Node) -> Node:
    """One scale for all is of no dimension: so the translations know it."""
    single = scale in rewriting.weights and all(size == 1 for size in shape_of(scale))
    return _flat(rewriting, scale, like) if single else scale


def _quantize(
    rewriting: _Rewriting, node: Node, source: Node, scale: Node, dtype: torch.dtype
) -> None:
    if dtype not in _QUANTIZED:
        raise LoweringError(
            f"enginecast.quantize to {dtype}: a program that rounds nothing is not an engine",
            hint="It is for verification; lower the program that it was made from.",
        )
    wanted = dtype_of(source)
    assert wanted is not None
    scale = _scale_of_values(rewriting, scale, node)
    on_tensorrt = rewriting.reader == "tensorrt"
    if dtype != torch.int8 or on_tensorrt:
        scale = rewriting.scale(scale, wanted, node)
    node.args = (source, scale, dtype)
    if dtype == torch.int8 and on_tensorrt:
        result = rewriting.add(ours.quantize_linear.default, source, scale, like=node)
        rewriting.replace(node, result)
        return
    readers = [user for user in node.users if user.target is ours.quantized_linear.default]
    if dtype == torch.int8 and rewriting.reader == "onnxruntime-cpu" and readers:
        zeros = rewriting.zeros(scale, like=node) if shape_of(scale) else None
        unsigned = rewriting.add(ours.quantize_unsigned.default, source, scale, zeros, like=node)
        for user in readers:
            user.replace_input_with(node, unsigned)
        if not node.users:
            node.graph.erase_node(node)


def _dequantize(
    rewriting: _Rewriting, node: Node, source: Node, scale: Node, dtype: torch.dtype
) -> None:
    if source in rewriting.weights and scale in rewriting.weights:
        _dequantize_weight(rewriting, node, source, scale, dtype)
        return
    scale = _scale_of_values(rewriting, scale, node)
    if source.target is aten.embedding.default and dtype_of(source) in _FP8:
        source = _rows_of_bytes(rewriting, source, node)
    node.args = (source, rewriting.scale(scale, dtype, node), dtype)


def _dequantize_weight(
    rewriting: _Rewriting, node: Node, source: Node, scale: Node, dtype: torch.dtype
) -> None:
    axis = _axis(shape_of(source), shape_of(scale))
    if axis is None:
        return  # as it is
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


def _matmul(rewriting: _Rewriting, linear: Node, weight: Node) -> None:
    bias = linear.args[2] if len(linear.args) > 2 else None
    with linear.graph.inserting_before(linear):
        result = rewriting.add(aten.matmul.default, linear.args[0], weight, like=linear)
        if bias is not None:
            result = rewriting.add(aten.add.Tensor, result, bias, like=linear)
    rewriting.replace(linear, result)


def _rows_of_bytes(rewriting: _Rewriting, rows: Node, like: Node) -> Node:
    """ONNX Runtime's Gather takes no fp8, and does take bytes."""
    table, indices = arguments(rows)[:2]
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


def _quantized_linear(rewriting: _Rewriting, node: Node, *args: Any) -> None:
    source, scale, weight, weight_scale, bias, dtype = args
    scale = _scale_of_values(rewriting, scale, node)
    flat = _flat(rewriting, weight_scale, node)
    wide_bias = rewriting.cast(bias, torch.float32, node) if isinstance(bias, Node) else None
    if dtype_of(weight) == torch.int8 and rewriting.reader != "tensorrt":
        turned = rewriting.add(aten.t.default, weight, like=node)
        form = ours.integer_linear.default
        result = rewriting.add(form, source, scale, turned, flat, wide_bias, dtype, like=node)
    elif rewriting.gemm_float8:
        form = ours.fp8_gemm.default
        result = rewriting.add(form, source, scale, weight, flat, wide_bias, dtype, like=node)
    else:
        turned = rewriting.add(aten.t.default, weight, like=node)
        scales = rewriting.scale(flat, dtype, node)
        form = ours.dequantize_axis.default
        wide_weight = rewriting.add(form, turned, scales, 1, dtype, like=node)
        scale = rewriting.scale(scale, dtype, node)
        wide = rewriting.once(ours.dequantize.default, source, scale, dtype, like=node)
        result = rewriting.add(aten.matmul.default, wide, wide_weight, like=node)
        if isinstance(bias, Node):
            bias = rewriting.cast(bias, dtype, node)
            result = rewriting.add(aten.add.Tensor, result, bias, like=node)
    rewriting.replace(node, result)


def _blockwise_linear(rewriting: _Rewriting, node: Node, *args: Any) -> None:
    """MatMulNBits wants scales in the dtype of x; where that does not hold them, x is cast."""
    source, weight, scale, bias, bits, activations = args
    dtype = dtype_of(source)
    assert dtype is not None
    if rewriting.reader == "tensorrt":
        wide = _dequantized_blocks(rewriting, node, weight, scale, bits, dtype)
        result = rewriting.add(aten.matmul.default, source, wide, like=node)
        if isinstance(bias, Node):
            result = rewriting.add(aten.add.Tensor, result, bias, like=node)
        rewriting.replace(node, result)
        return
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


def _dequantized_blocks(
    rewriting: _Rewriting, node: Node, weight: Node, scale: Node, bits: int, dtype: torch.dtype
) -> Node:
    """A weight [K, N] from blocks along K: int4 is transposed before, floats after, as NVIDIA's
    Model Optimizer writes them.
    """
    if dtype_of(weight) == torch.int8:
        turned, scales = (rewriting.add(aten.t.default, x, like=node) for x in (weight, scale))
        blocks = (turned, rewriting.scale(scales, dtype, node), 0, bits, dtype)
        return rewriting.add(ours.dequantize_blocks.default, *blocks, like=node)
    inner, outer = arguments(scale)[:2]
    if dtype_of(inner) == E8M0:
        exponents = rewriting.add(aten.view.dtype, inner, torch.uint8, like=node)
        mx = (weight, exponents, 1, dtype)
        wide = rewriting.add(ours.dequantize_mx.default, *mx, like=node)
    else:
        outer = rewriting.scale(outer, dtype, node)
        scales = rewriting.add(ours.dequantize.default, inner, outer, dtype, like=node)
        blocks = (weight, scales, 1, bits, dtype)
        wide = rewriting.add(ours.dequantize_blocks.default, *blocks, like=node)
    return rewriting.add(aten.t.default, wide, like=node)


def _quantized_conv(rewriting: _Rewriting, node: Node, *args: Any) -> None:
    """A scale for each channel of what is given becomes a part of the weight's: QLinearConv has one
    for all, and only ever uses their quotient.
    """
    scale, y_scale = args[4], args[10]
    scale = rewriting.add(aten.reshape.default, scale, [-1], like=node)
    if shape_of(y_scale):
        y_scale = rewriting.add(aten.reshape.default, y_scale, [-1], like=node)
        scale = rewriting.add(aten.div.Tensor, scale, y_scale, like=node)
        key = ("one",)
        if key not in rewriting.made:
            kind = InputKind.CONSTANT_TENSOR
            name = free_name(rewriting.program, "one")
            rewriting.made[key] = add_weight(rewriting.program, name, torch.ones(()), kind)
        node.update_arg(10, rewriting.made[key])
    node.update_arg(4, scale)


_RULES: dict[Any, Callable[..., None]] = {
    ours.quantize.default: _quantize,
    ours.dequantize.default: _dequantize,
    ours.quantized_linear.default: _quantized_linear,
    ours.blockwise_linear.default: _blockwise_linear,
    ours.quantized_conv.default: _quantized_conv,
}
