"""Quantized values, and products of integers.  legalize-quantized has chosen among these ops."""

from collections.abc import Sequence
from typing import Any

import onnx
import onnx_ir as ir
from onnxscript import opset23 as op

from enginecast.exporters.onnx.ops.microsoft import (
    dynamic_lstm,
    dynamic_product,
    gemm_float8,
    integer_to_float,
    mx_dequantize,
    nbits_product,
    quantized_sum,
)
from enginecast.exporters.onnx.ops.recurrent import HOP, Body
from enginecast.exporters.onnx.ops.registry import FORMS, ONNXRUNTIME, PLAIN, READERS, form
from enginecast.exporters.onnx.ops.values import FLOAT, UINT8, ints, scalar
from enginecast.library_names import private
from enginecast.ops.quantize import SMALLEST_SCALE, ZERO
from enginecast.passes.ir.effects import own


def _as(value: Any, dtype: ir.DataType) -> Any:
    return value if value.dtype == dtype else op.Cast(value, to=int(dtype))


_LIMITS = {
    ir.DataType.FLOAT8E4M3FN: 448.0,
    ir.DataType.FLOAT8E5M2: 57344.0,
    ir.DataType.INT8: 127.0,
}


@form(own.dynamic_scale.default)
def _dynamic_scale(x: Any, dtype: int, per_row: bool) -> Any:
    """Both ends are looked for: on ONNX Runtime 1.31's CPU provider that was measured to be cheaper
    than magnitudes, which are written first.
    """
    along = [ints(-1)] if per_row else []
    lowest = op.Neg(op.ReduceMin(x, *along, keepdims=int(per_row)))
    largest = op.Max(op.ReduceMax(x, *along, keepdims=int(per_row)), lowest)
    scale = op.Div(_as(largest, FLOAT), scalar(_LIMITS[ir.DataType(dtype)]))
    return op.Max(scale, scalar(SMALLEST_SCALE))


@form(own.quantize.default)
def _quantize(x: Any, scale: Any, dtype: int) -> Any:
    """One scale is QuantizeLinear's, which saturates; a scale for each row is none of ONNX (there
    the sizes of scales are static), so the clamp is a node.
    """
    wanted = ir.DataType(dtype)
    limit = _LIMITS[wanted]
    if len(scale.shape) == 0:
        found = op.QuantizeLinear(_as(x, scale.dtype), scale, output_dtype=int(wanted))
        # Symmetric: -128 is not used.
        return op.Clip(found, scalar(-127, wanted)) if wanted == ir.DataType.INT8 else found
    scaled = op.Div(_as(x, FLOAT), scale)
    if wanted == ir.DataType.INT8:
        scaled = op.Round(scaled)
    return op.Cast(op.Clip(scaled, scalar(-limit), scalar(limit)), to=int(wanted))


@form(own.quantize_unsigned.default, readers=ONNXRUNTIME)
def _quantize_unsigned(x: Any, scale: Any, zeros: Any) -> Any:
    """Measured on ONNX Runtime 1.31's CPU provider: a block as long as the row is the fastest way
    to a scale for each row.
    """
    wide = _as(x, FLOAT)
    if zeros is not None:
        return op.QuantizeLinear(wide, scale, zeros, axis=-1, block_size=x.shape[-1])
    found = op.QuantizeLinear(wide, scale, scalar(ZERO, UINT8))
    return op.Clip(found, scalar(1, UINT8))  # symmetric: 0 stands for -128


@form(own.dequantize.default)
def _dequantize(q: Any, scale: Any, dtype: int) -> Any:
    if len(scale.shape) == 0 and q.dtype != FLOAT:  # which bytes stand for
        return _as(op.DequantizeLinear(q, scale), ir.DataType(dtype))
    return _as(op.Mul(op.Cast(q, to=int(FLOAT)), scale), ir.DataType(dtype))


@form(own.dequantize_axis.default)
def _dequantize_axis(q: Any, scale: Any, axis: int, dtype: int) -> Any:
    """The zeros are for ONNX Runtime, whose rewriting of int8 to uint8 (where products saturate)
    would add a single one to scales of an axis, which its kernel refuses.
    """
    options = {"axis": axis} if len(scale.shape) else {}
    zeros = None
    if q.dtype == ir.DataType.INT8 and options:
        size = q.shape[axis]
        zeros = op.Constant(
            value=onnx.helper.make_tensor("zeros", int(q.dtype), [size], [0] * size)
        )
    return _as(op.DequantizeLinear(q, scale, zeros, **options), ir.DataType(dtype))


@form(own.quantize_linear.default, readers=["tensorrt"])
def _quantize_linear(x: Any, scale: Any) -> Any:
    return op.QuantizeLinear(x, scale, output_dtype=int(ir.DataType.INT8))


@form(own.dequantize_blocks.default, readers=["tensorrt"])
def _dequantize_blocks(q: Any, scale: Any, axis: int, bits: int, dtype: int) -> Any:
    """A constant that is cast to 4 bits is stored in 4 bits (`exporters.onnx.weights`)."""
    kinds = {ir.DataType.INT8: ir.DataType.INT4, ir.DataType.FLOAT8E4M3FN: ir.DataType.FLOAT4E2M1}
    stored = op.Cast(q, to=int(kinds[q.dtype])) if bits == 4 else q
    block = q.shape[axis] // scale.shape[axis]
    return op.DequantizeLinear(stored, scale, axis=axis, block_size=block)


@form(own.dequantize_mx.default, readers=["tensorrt"])
def _dequantize_mx(q: Any, exponents: Any, axis: int, dtype: int) -> Any:
    block = q.shape[axis] // exponents.shape[axis]
    return mx_dequantize(q, exponents, axis=axis, block_size=block, output_dtype=dtype)


@form(own.integer_linear.default, readers=["onnxruntime-cpu"])
def _integer_linear_on_cpu(
    x: Any, x_scale: Any, weight: Any, weight_scale: Any, bias: Any, dtype: int
) -> Any:
    zero = scalar(ZERO, UINT8)
    if len(x_scale.shape) == 0:
        found = integer_to_float(x, weight, x_scale, weight_scale, zero, None, bias)
        return _as(found, ir.DataType(dtype))
    one = scalar(1.0)
    found = integer_to_float(x, weight, one, weight_scale, zero, None, None)
    found = op.Mul(found, x_scale)
    return _as(found if bias is None else op.Add(found, bias), ir.DataType(dtype))


@form(own.integer_linear.default, readers=["onnxruntime-cuda"])
def _integer_linear(
    x: Any, x_scale: Any, weight: Any, weight_scale: Any, bias: Any, dtype: int
) -> Any:
    found = op.Cast(op.MatMulInteger(x, weight), to=int(FLOAT))
    found = op.Mul(op.Mul(found, x_scale), weight_scale)
    return _as(found if bias is None else op.Add(found, bias), ir.DataType(dtype))


@form(own.quantize_affine.default, readers=["onnxruntime-cpu"])
def _quantize_affine(x: Any, scale: Any, zero: int, dtype: int) -> Any:
    return op.QuantizeLinear(_as(x, FLOAT), scale, scalar(zero, UINT8))


@form(own.dequantize_affine.default, readers=["onnxruntime-cpu"])
def _dequantize_affine(q: Any, scale: Any, zero: int, dtype: int) -> Any:
    if len(scale.shape):
        channels = scale.shape[0]
        zeros = onnx.helper.make_tensor("zeros", int(q.dtype), [channels], [zero] * channels)
        scales = op.Reshape(scale, ints(-1))
        found = op.DequantizeLinear(q, scales, op.Constant(value=zeros), axis=1)
    else:
        found = op.DequantizeLinear(q, scale, scalar(zero, UINT8))
    return _as(found, ir.DataType(dtype))


@form(own.quantized_conv.default, readers=["onnxruntime-cpu"])
def _quantized_conv(
    x: Any,
    x_scale: Any,
    x_zero: int,
    weight: Any,
    weight_scale: Any,
    bias: Any,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    y_scale: Any,
    y_zero: int,
    low: float | None,
    high: float | None,
) -> Any:
    """ConvInteger, which would leave the scale of the result to floats, takes ten times as long on
    ONNX Runtime 1.31's CPU provider.
    """
    zeros = onnx.helper.make_tensor(
        "zeros", int(ir.DataType.INT8), [weight.shape[0]], [0] * weight.shape[0]
    )
    found = op.QLinearConv(
        *(x, x_scale, scalar(x_zero, UINT8)),
        *(weight, weight_scale, op.Constant(value=zeros)),
        *(y_scale, scalar(y_zero, UINT8), bias),
        kernel_shape=list(weight.shape[2:]),
        strides=list(stride),
        pads=list(padding),
        dilations=list(dilation),
        group=groups,
    )
    return _limited(found, y_scale, y_zero, low, high)


@form(own.quantized_add.default, readers=["onnxruntime-cpu"])
def _quantized_add(
    left: Any,
    left_scale: Any,
    left_zero: int,
    right: Any,
    right_scale: Any,
    right_zero: int,
    y_scale: Any,
    y_zero: int,
    low: float | None,
    high: float | None,
) -> Any:
    zeros = [scalar(zero, UINT8) for zero in (left_zero, right_zero, y_zero)]
    sides = (left, left_scale, zeros[0], right, right_scale, zeros[1])
    found = quantized_sum(*sides, y_scale, zeros[2])
    return _limited(found, y_scale, y_zero, low, high)


def _limited(values: Any, scale: Any, zero: int, low: float | None, high: float | None) -> Any:
    """Unsigned values of what is within two limits: the steps at which these lie.  A limit of 0
    that the lowest step stands for is there already.
    """
    if low == 0 and zero == 0:
        low = None
    if low is None and high is None:
        return values
    uint8 = UINT8
    ends = [
        None if limit is None else op.QuantizeLinear(scalar(limit), scale, scalar(zero, uint8))
        for limit in (low, high)
    ]
    return op.Clip(values, *ends)


@form(own.quantized_lstm.default, readers=["onnxruntime-cpu"])
def _quantized_lstm(
    x: Any,
    hidden: Any,
    cell: Any,
    weight: Any,
    weight_scale: Any,
    recurrence: Any,
    recurrence_scale: Any,
    bias: Any,
) -> tuple[Any, Any, Any]:
    directions, size, gates = recurrence.shape
    zeros = onnx.helper.make_tensor(
        "zeros", int(ir.DataType.INT8), [directions, gates], [0] * (directions * gates)
    )
    zero = op.Constant(value=zeros)
    found, last, memory = dynamic_lstm(
        *(x, weight, recurrence, bias, None, hidden, cell, None),
        *(weight_scale, zero, recurrence_scale, zero),
        hidden_size=size,
        direction="bidirectional" if directions == 2 else "forward",
    )
    rows = op.Transpose(found, perm=[0, 2, 1, 3])
    return op.Reshape(rows, ints(0, 0, directions * size)), last, memory


@form(own.quantized_gru.default, readers=["onnxruntime-cpu"])
def _quantized_gru(
    x: Any,
    hidden: Any,
    weight: Any,
    weight_scale: Any,
    recurrence: Any,
    recurrence_scale: Any,
    bias: Any,
    recurrence_bias: Any,
    backward: bool,
) -> tuple[Any, Any]:
    """ONNX Runtime has no GRU of integers: one product of the input of all steps, and a Scan."""
    call_op = private(f"{HOP}.call_op", "a quantized GRU")
    given = dynamic_product(x, weight, weight_scale, None, bias)
    kept = (recurrence, recurrence_scale, None, recurrence_bias)
    body = _gru_step(hidden, recurrence.shape[0], kept)
    way = [1 if backward else 0]
    last, found = call_op(
        *("Scan", hidden, given),
        _num_outputs=2,
        body=body,
        num_scan_inputs=1,
        scan_input_directions=way,
        scan_output_directions=way,
    )
    return found, last


def _gru_step(hidden: Any, size: int, kept: Sequence[Any]) -> ir.Graph:
    """The body of the Scan: from a state and the products of one step of the input to the next
    state, twice.
    """
    body = Body("gru", FLOAT)
    add = body.add
    state = body.value("state", hidden.shape)
    given = body.value("given", [hidden.shape[0], 3 * size])
    held = add("DynamicQuantizeMatMul", state, *kept, domain="com.microsoft")
    resets, updates, new = add("Split", given, count=3, axis=-1, num_outputs=3)
    held_resets, held_updates, held_new = add("Split", held, count=3, axis=-1, num_outputs=3)
    opened = add("Sigmoid", add("Add", resets, held_resets))
    fresh = add("Tanh", add("Add", new, add("Mul", opened, held_new)))
    share = add("Sigmoid", add("Add", updates, held_updates))
    following = add("Add", fresh, add("Mul", share, add("Sub", state, fresh)))
    shape = hidden.shape
    return body.graph((state, given), [(following, shape), (add("Identity", following), shape)])


@form(own.packed_linear.default, readers=ONNXRUNTIME)
def _packed_linear(x: Any, packed: Any, scale: Any, bias: Any, bits: int, activations: bool) -> Any:
    rows, blocks, size = packed.shape
    block = size * 8 // bits
    return nbits_product(
        x,
        packed,
        scale,
        None,
        None,
        bias,
        K=blocks * block,
        N=rows,
        bits=bits,
        block_size=block,
        accuracy_level=4 if activations else 0,
    )


@form(own.fp8_gemm.default, readers=["onnxruntime-cuda"])
def _fp8_gemm(x: Any, x_scale: Any, weight: Any, weight_scale: Any, bias: Any, dtype: int) -> Any:
    """GemmFloat8 takes matrices, and one scale for each; scales of rows follow it, in fp32."""
    rows, size = weight.shape
    flat = op.Reshape(x, ints(-1, size))
    in_gemm = [found if len(found.shape) == 0 else None for found in (x_scale, weight_scale)]
    scales = [scalar(1.0) if found is None else found for found in in_gemm]
    whole = None not in in_gemm and bias is None
    kind = dtype if whole else int(FLOAT)
    found = gemm_float8(flat, weight, None, *scales, transB=1, dtype=kind)
    shape = op.Concat(op.Shape(x, end=-1), ints(rows), axis=0)
    found = op.Reshape(found, shape)
    for scale, inside in zip((x_scale, weight_scale), in_gemm, strict=True):
        found = found if inside is not None else op.Mul(found, scale)
    found = found if bias is None else op.Add(found, bias)
    return found if whole else _as(found, ir.DataType(dtype))


@form(own.values_of_bytes.default, readers=ONNXRUNTIME)
def _values_of_bytes(raw: Any, table: Any) -> Any:
    return op.Gather(table, op.Cast(raw, to=int(ir.DataType.INT32)))


for _reader in READERS:
    _refuse = FORMS[_reader].refuse
    _refuse(
        *(own.quantized_linear.default, own.blockwise_linear.default),
        reason="legalize-quantized gives it another form",
    )
    _refuse(
        *(own.quantize_blocks.default, own.pack_blocks.default, own.power_of_two.default),
        reason="it computes weights, while the file is written",
    )
    if _reader != "onnxruntime-cpu":
        _refuse(
            *(own.quantize_affine.default, own.dequantize_affine.default),
            *(own.quantized_conv.default, own.quantized_add.default),
            *(own.quantized_lstm.default, own.quantized_gru.default),
            reason="ONNX Runtime has it on the CPU alone",
        )
    if _reader != "tensorrt":
        _refuse(
            *(own.quantize_linear.default, own.dequantize_blocks.default),
            own.dequantize_mx.default,
            reason="a form for TensorRT",
        )
    if _reader in PLAIN:
        _refuse(
            *(own.quantize_unsigned.default, own.integer_linear.default, own.fp8_gemm.default),
            *(own.packed_linear.default, own.values_of_bytes.default),
            reason="a form for ONNX Runtime",
        )
FORMS["onnxruntime-cpu"].refuse(own.fp8_gemm.default, reason="only CUDA has GemmFloat8")
