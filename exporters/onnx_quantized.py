"""How quantised values are said in ONNX: a translation table for torch.onnx.export.

What the schemas say is from onnxruntime docs/ContribOperators.md.
"""

from collections.abc import Callable
from typing import Any

import onnx
import onnx_ir as ir
import onnxscript
import torch
from onnx.defs import OpSchema
from onnxscript import opset23 as op

import enginecast.exporters.quantized_forms  # noqa: F401 - registers the ops
from enginecast.exporters.quantized_forms import ZERO
from enginecast.exporters.readers import Reader
from enginecast.quantized_ops import SMALLEST_SCALE

MICROSOFT = onnxscript.values.Opset("com.microsoft", 1)
_LIMITS = {
    ir.DataType.FLOAT8E4M3FN: 448.0,
    ir.DataType.FLOAT8E5M2: 57344.0,
    ir.DataType.INT8: 127.0,
}
_FLOAT = ir.DataType.FLOAT
_FLOATS = ["tensor(float)", "tensor(float16)", "tensor(bfloat16)"]
_FP8 = ["tensor(float8e4m3fn)", "tensor(float8e5m2)"]
_OPTIONAL = OpSchema.FormalParameterOption.Optional


def _schema(
    name: str,
    inputs: dict[str, str],
    types: dict[str, list[str]],
    attributes: dict[str, OpSchema.AttrType],
    *,
    required: int,
) -> OpSchema:
    """Inputs map a name to its type constraint; the output is of the last constraint."""
    parameters = [
        OpSchema.FormalParameter(n, t, **({} if i < required else {"param_option": _OPTIONAL}))
        for i, (n, t) in enumerate(inputs.items())
    ]
    return OpSchema(
        name,
        "com.microsoft",
        1,
        inputs=parameters,
        outputs=[OpSchema.FormalParameter("Y", list(types)[-1])],
        type_constraints=[(key, allowed, "") for key, allowed in types.items()],
        attributes=[OpSchema.Attribute(n, kind, required=False) for n, kind in attributes.items()],
    )


_INT, _REAL, _TEXT = OpSchema.AttrType.INT, OpSchema.AttrType.FLOAT, OpSchema.AttrType.STRING
_INTEGER_TO_FLOAT = _schema(
    "MatMulIntegerToFloat",
    {
        "A": "T1",
        "B": "T2",
        "a_scale": "T3",
        "b_scale": "T3",
        "a_zero_point": "T1",
        "b_zero_point": "T2",
        "bias": "T3",
    },
    {
        "T1": ["tensor(int8)", "tensor(uint8)"],
        "T2": ["tensor(int8)", "tensor(uint8)"],
        "T3": ["tensor(float)", "tensor(float16)"],
    },
    {},
    required=4,
)
_NBITS = _schema(
    "MatMulNBits",
    {"A": "T1", "B": "T2", "scales": "T1", "zero_points": "T3", "g_idx": "T4", "bias": "T1"},
    {
        "T2": ["tensor(uint8)"],
        "T3": ["tensor(uint8)", *_FLOATS],
        "T4": ["tensor(int32)"],
        "T1": _FLOATS,
    },
    dict.fromkeys(("K", "N", "bits", "block_size", "accuracy_level"), _INT),
    required=3,
)
_GEMM_FLOAT8 = _schema(
    "GemmFloat8",
    {"A": "TA", "B": "TB", "C": "TC", "scaleA": "TS", "scaleB": "TS", "scaleY": "TS"},
    {
        "TA": [*_FP8, *_FLOATS],
        "TB": [*_FP8, *_FLOATS],
        "TC": _FLOATS,
        "TS": ["tensor(float)"],
        "TR": [*_FP8, *_FLOATS],
    },
    {
        **dict.fromkeys(("transA", "transB", "dtype"), _INT),
        **dict.fromkeys(("alpha", "beta"), _REAL),
        "activation": _TEXT,
    },
    required=2,
)
_integer_to_float = onnxscript.values.Op(MICROSOFT, _INTEGER_TO_FLOAT.name, _INTEGER_TO_FLOAT)
_nbits = onnxscript.values.Op(MICROSOFT, _NBITS.name, _NBITS)
_gemm_float8 = onnxscript.values.Op(MICROSOFT, _GEMM_FLOAT8.name, _GEMM_FLOAT8)


def _scalar(value: float, dtype: ir.DataType = _FLOAT) -> Any:
    return op.Constant(value=onnx.helper.make_tensor("value", int(dtype), [], [value]))


def _as(value: Any, dtype: ir.DataType) -> Any:
    return value if value.dtype == dtype else op.Cast(value, to=int(dtype))


def _dynamic_scale(x: Any, dtype: int, per_row: bool) -> Any:
    """Of a whole tensor, both ends are looked for: on ONNX Runtime 1.31's CPU provider that was
    measured to be cheaper than magnitudes, which are written first; of rows it was not.
    """
    if per_row:
        largest = op.ReduceMax(op.Abs(x), op.Constant(value_ints=[-1]), keepdims=1)
    else:
        lowest = op.Neg(op.ReduceMin(x, keepdims=0))
        largest = op.Max(op.ReduceMax(x, keepdims=0), lowest)
    scale = op.Div(_as(largest, _FLOAT), _scalar(_LIMITS[ir.DataType(dtype)]))
    return op.Max(scale, _scalar(SMALLEST_SCALE))


def _quantize(x: Any, scale: Any, dtype: int) -> Any:
    """One scale is QuantizeLinear's, which saturates; a scale for each row is none of ONNX (there
    the sizes of scales are static), so the clamp is a node.
    """
    wanted = ir.DataType(dtype)
    limit = _LIMITS[wanted]
    if len(scale.shape) == 0:
        found = op.QuantizeLinear(_as(x, scale.dtype), scale, output_dtype=int(wanted))
        # Symmetric: -128 is not used.
        return op.Clip(found, _scalar(-127, wanted)) if wanted == ir.DataType.INT8 else found
    scaled = op.Div(_as(x, _FLOAT), scale)
    if wanted == ir.DataType.INT8:
        scaled = op.Round(scaled)
    return op.Cast(op.Clip(scaled, _scalar(-limit), _scalar(limit)), to=int(wanted))


def _quantize_unsigned(x: Any, scale: Any) -> Any:
    """Measured on ONNX Runtime 1.31's CPU provider: a block as long as the row is the fastest way
    to a scale for each row.
    """
    zero = _scalar(ZERO, ir.DataType.UINT8)
    wide = _as(x, _FLOAT)
    if len(scale.shape) == 0:
        found = op.QuantizeLinear(wide, scale, zero)
    else:
        zeros = op.Expand(zero, op.Shape(scale))
        found = op.QuantizeLinear(wide, scale, zeros, axis=-1, block_size=x.shape[-1])
    return op.Clip(found, _scalar(1, ir.DataType.UINT8))  # symmetric: 0 stands for -128


def _dequantize(q: Any, scale: Any, dtype: int) -> Any:
    if len(scale.shape) == 0:
        return _as(op.DequantizeLinear(q, scale), ir.DataType(dtype))
    return _as(op.Mul(op.Cast(q, to=int(_FLOAT)), scale), ir.DataType(dtype))


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


def _integer_linear(reader: Reader) -> Callable[..., Any]:
    def on_cpu(x: Any, x_scale: Any, weight: Any, weight_scale: Any, bias: Any, dtype: int) -> Any:
        zero = _scalar(ZERO, ir.DataType.UINT8)
        if len(x_scale.shape) == 0:
            found = _integer_to_float(x, weight, x_scale, weight_scale, zero, None, bias)
            return _as(found, ir.DataType(dtype))
        one = _scalar(1.0)
        found = _integer_to_float(x, weight, one, weight_scale, zero, None, None)
        found = op.Mul(found, x_scale)
        return _as(found if bias is None else op.Add(found, bias), ir.DataType(dtype))

    def on_cuda(x: Any, x_scale: Any, weight: Any, weight_scale: Any, bias: Any, dtype: int) -> Any:
        found = op.Cast(op.MatMulInteger(x, weight), to=int(_FLOAT))
        found = op.Mul(op.Mul(found, x_scale), weight_scale)
        return _as(found if bias is None else op.Add(found, bias), ir.DataType(dtype))

    return on_cpu if reader == "onnxruntime-cpu" else on_cuda


def _packed_linear(x: Any, packed: Any, scale: Any, bias: Any, bits: int, activations: bool) -> Any:
    rows, blocks, size = packed.shape
    block = size * 8 // bits
    return _nbits(
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


def _fp8_gemm(x: Any, x_scale: Any, weight: Any, weight_scale: Any, bias: Any, dtype: int) -> Any:
    """GemmFloat8 takes matrices, and one scale for each; scales of rows follow it, in fp32."""
    rows, size = weight.shape
    flat = op.Reshape(x, op.Constant(value_ints=[-1, size]))
    in_gemm = [found if len(found.shape) == 0 else None for found in (x_scale, weight_scale)]
    scales = [_scalar(1.0) if found is None else found for found in in_gemm]
    whole = None not in in_gemm and bias is None
    kind = dtype if whole else int(_FLOAT)
    found = _gemm_float8(flat, weight, None, *scales, transB=1, dtype=kind)
    shape = op.Concat(op.Shape(x, end=-1), op.Constant(value_ints=[rows]), axis=0)
    found = op.Reshape(found, shape)
    for scale, inside in zip((x_scale, weight_scale), in_gemm, strict=True):
        found = found if inside is not None else op.Mul(found, scale)
    found = found if bias is None else op.Add(found, bias)
    return found if whole else _as(found, ir.DataType(dtype))


def _values_of_bytes(raw: Any, table: Any) -> Any:
    return op.Gather(table, op.Cast(raw, to=int(ir.DataType.INT32)))


def quantized_translations(*, reader: Reader) -> dict[Callable[..., Any], Callable[..., Any]]:
    """By operator; see `translation_table`."""
    ops = torch.ops.enginecast
    return {
        ops.dynamic_scale.default: _dynamic_scale,
        ops.quantize.default: _quantize,
        ops.quantize_unsigned.default: _quantize_unsigned,
        ops.dequantize.default: _dequantize,
        ops.dequantize_axis.default: _dequantize_axis,
        ops.integer_linear.default: _integer_linear(reader),
        ops.packed_linear.default: _packed_linear,
        ops.fp8_gemm.default: _fp8_gemm,
        ops.values_of_bytes.default: _values_of_bytes,
    }
