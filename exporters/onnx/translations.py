"""How a program's ops are said in ONNX: the rules that torch.onnx.export is given.

com.microsoft ops have no schema in the onnx package, and the exporter needs one to type them: the
schemas here are handed to it directly, without registering anything globally.  They are those of
onnxruntime docs/ContribOperators.md.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import onnx
import onnx_ir as ir
import onnxscript
import torch
from onnx.defs import OpSchema
from onnx_ir.tensor_adapters import to_torch_dtype
from onnxscript import opset23 as op

from enginecast.exporters.onnx.readers import READERS, Reader
from enginecast.library_names import MissingOperator, higher_order, private
from enginecast.ops.quantize import SMALLEST_SCALE, ZERO
from enginecast.ops.rules import Rules
from enginecast.passes.ir.effects import aten, own

Translation = Callable[..., Any]
TRANSLATIONS: Mapping[Reader, Rules[Translation]] = {reader: Rules() for reader in READERS}
"""Op -> what it is in ONNX, for each reader: they are fast with different ops, and TensorRT has
none of com.microsoft."""

_ONNXRUNTIME: Sequence[Reader] = ("onnxruntime-cpu", "onnxruntime-cuda")
_PLAIN: Sequence[Reader] = ("tensorrt", "openvino")
"""They get ops of ONNX's own alone."""

_LIMITS = {
    ir.DataType.FLOAT8E4M3FN: 448.0,
    ir.DataType.FLOAT8E5M2: 57344.0,
    ir.DataType.INT8: 127.0,
}
FEW_TOKENS = 8
"""With as many of a call or fewer, heads that share keys are multiplied together."""
FEWEST_TASKS = 8
"""Products that are left to the cores then: ONNX Runtime gives each to one."""
MANY_ROWS = 4
"""Rows of a batch that are counted on, where there are as many or more."""
_MICROSOFT = onnxscript.values.Opset("com.microsoft", 1)
_INT, _REAL = OpSchema.AttrType.INT, OpSchema.AttrType.FLOAT
_FLOATS = ["tensor(float)", "tensor(float16)", "tensor(bfloat16)"]
_UINT8 = ["tensor(uint8)"]
_INT8 = ["tensor(int8)", *_UINT8]
_ANY = ["tensor(float8e4m3fn)", "tensor(float8e5m2)", *_FLOATS]
_FLOAT = ir.DataType.FLOAT


def _op(
    name: str,
    inputs: str,
    types: Mapping[str, list[str]],
    attributes: Mapping[str, OpSchema.AttrType],
    *,
    required: int,
    outputs: str,
) -> onnxscript.values.Op:
    """An op of com.microsoft.

    Args:
        inputs: each as name:type, with the name of a type constraint.
        required: how many of the inputs are; of the outputs, the first one is.
    """

    def parameters(typed: str, required: int) -> list[OpSchema.FormalParameter]:
        optional = {"param_option": OpSchema.FormalParameterOption.Optional}
        return [
            OpSchema.FormalParameter(*one.split(":"), **({} if place < required else optional))
            for place, one in enumerate(typed.split())
        ]

    schema = OpSchema(
        name,
        "com.microsoft",
        1,
        inputs=parameters(inputs, required),
        outputs=parameters(outputs, 1),
        type_constraints=[(key, allowed, "") for key, allowed in types.items()],
        attributes=[OpSchema.Attribute(n, kind, required=False) for n, kind in attributes.items()],
    )
    return onnxscript.values.Op(_MICROSOFT, name, schema)


_skip_norm_op = _op(
    "SkipSimplifiedLayerNormalization",
    "input:T skip:T gamma:T bias:T",
    {"T": _FLOATS, "U": ["tensor(float)"]},
    {"epsilon": _REAL},
    required=3,
    outputs="output:T mean:U inv_std_var:U input_skip_bias_sum:T",
)
_multi_head_op = _op(
    "MultiHeadAttention",
    "query:T key:T value:T bias:T key_padding_mask:M attention_bias:T",
    {"T": _FLOATS, "M": ["tensor(int32)"]},
    {"num_heads": _INT, "scale": _REAL},
    required=1,
    outputs="output:T",
)
_integer_to_float = _op(
    "MatMulIntegerToFloat",
    "A:T1 B:T2 a_scale:T3 b_scale:T3 a_zero_point:T1 b_zero_point:T2 bias:T3",
    {"T1": _INT8, "T2": _INT8, "T3": ["tensor(float)", "tensor(float16)"]},
    {},
    required=4,
    outputs="Y:T3",
)
_dynamic_product = _op(
    "DynamicQuantizeMatMul",
    "A:T1 B:T2 b_scale:T1 b_zero_point:T2 bias:T1",
    {"T1": ["tensor(float)"], "T2": _INT8},
    {},
    required=3,
    outputs="Y:T1",
)
_quantized_sum = _op(
    "QLinearAdd",
    "A:T A_scale:S A_zero_point:T B:T B_scale:S B_zero_point:T C_scale:S C_zero_point:T",
    {"T": _UINT8, "S": ["tensor(float)"]},
    {},
    required=8,
    outputs="C:T",
)
_dynamic_lstm = _op(
    "DynamicQuantizeLSTM",
    "X:T W:T2 R:T2 B:T sequence_lens:T1 initial_h:T initial_c:T P:T W_scale:T W_zero_point:T2"
    " R_scale:T R_zero_point:T2",
    {"T": ["tensor(float)"], "T1": ["tensor(int32)"], "T2": _INT8},
    {"hidden_size": _INT, "direction": OpSchema.AttrType.STRING},
    required=3,
    outputs="Y:T Y_h:T Y_c:T",
)
_nbits = _op(
    "MatMulNBits",
    "A:T1 B:T2 scales:T1 zero_points:T3 g_idx:T4 bias:T1",
    {"T1": _FLOATS, "T2": _UINT8, "T3": [*_UINT8, *_FLOATS], "T4": ["tensor(int32)"]},
    dict.fromkeys(("K", "N", "bits", "block_size", "accuracy_level"), _INT),
    required=3,
    outputs="Y:T1",
)
_gemm_float8 = _op(
    "GemmFloat8",
    "A:TA B:TB C:TC scaleA:TS scaleB:TS scaleY:TS",
    {"TA": _ANY, "TB": _ANY, "TC": _FLOATS, "TS": ["tensor(float)"], "TR": _ANY},
    {"transA": _INT, "transB": _INT, "dtype": _INT, "alpha": _REAL, "beta": _REAL},
    required=2,
    outputs="Y:TR",
)


def scalar(value: float, dtype: ir.DataType = _FLOAT) -> Any:
    """A number as a constant of ONNX."""
    return op.Constant(value=onnx.helper.make_tensor("value", int(dtype), [], [value]))


def _as(value: Any, dtype: ir.DataType) -> Any:
    return value if value.dtype == dtype else op.Cast(value, to=int(dtype))


def _translation(*ops: Any, readers: Sequence[Reader] = READERS) -> Callable[[Any], Any]:
    """Register the decorated translation for these ops."""

    def register(translation: Translation) -> Translation:
        for reader in readers:
            TRANSLATIONS[reader].rule(*ops)(translation)
        return translation

    return register


@_translation(operator.floordiv)
def _floor_divide(left: Any, right: Any) -> Any:
    """`left // right` of integers: rounds down, while ONNX's Div rounds to zero."""
    multiple = op.Sub(left, op.Mod(left, right))  # Mod has the sign of the divisor, as Python's %
    return op.Div(multiple, right)


@_translation(own.skip_rms_norm.default, readers=_ONNXRUNTIME)
def _skip_rms_norm(x: Any, residual: Any, weight: Any, epsilon: float) -> tuple[Any, Any]:
    results = _skip_norm_op(x, residual, weight, epsilon=epsilon)
    return results[0], results[3]


@_translation(own.skip_rms_norm.default, readers=_PLAIN)
def _add_and_norm(x: Any, residual: Any, weight: Any, epsilon: float) -> tuple[Any, Any]:
    """The same in ops of ONNX's own."""
    total = op.Add(x, residual)
    return op.RMSNormalization(total, weight, axis=-1, epsilon=epsilon), total


@_translation(aten.rms_norm.default)
def _rms_norm(
    input: Any,
    normalized_shape: list[int],
    weight: Any = None,
    eps: float | None = None,
) -> Any:
    if weight is None:
        one = onnx.helper.make_tensor("one", input.dtype, [1], [1.0])
        weight = op.ConstantOfShape(op.Constant(value_ints=list(normalized_shape)), value=one)
    if eps is None:
        eps = torch.finfo(to_torch_dtype(input.dtype)).eps
    return op.RMSNormalization(input, weight, axis=-len(normalized_shape), epsilon=eps)


@_translation(own.attention.default, readers=["onnxruntime-cuda", "openvino"])
def _attention(
    query: Any,
    key: Any,
    value: Any,
    bias: Any,
    heads: int,
    kv_heads: int,
    scale: float,
    causal: bool,
) -> Any:
    """The CUDA provider has kernels of Attention (opset 23) for fp16 and bf16
    (microsoft/onnxruntime#27542, older than the oldest version taken).

    A row whose keys are all -inf is zeros, as in torch.  ONNX Runtime (1.31, CPU) takes the lowest
    number for -inf, too; legalize-onnx keeps a bias above it.
    """
    counts = {"q_num_heads": heads, "kv_num_heads": kv_heads} if len(query.shape) == 3 else {}
    return _attend(query, key, value, bias, scale=scale, is_causal=int(causal), **counts)


@_translation(own.attention.default, readers=["onnxruntime-cpu"])
def _attention_on_cpu(
    query: Any,
    key: Any,
    value: Any,
    bias: Any,
    heads: int,
    kv_heads: int,
    scale: float,
    causal: bool,
) -> Any:
    """Attention was measured to be the faster one with a bias, and MultiHeadAttention without."""
    if bias is None and len(query.shape) == 3 and heads == kv_heads and not causal:
        return _multi_head_op(query, key, value, num_heads=heads, scale=scale)
    return _attention(query, key, value, bias, heads, kv_heads, scale, causal)


@_translation(own.cached_attention.default, readers=["onnxruntime-cpu"])
def _cached_attention(
    query: Any,
    key: Any,
    value: Any,
    past_key: Any,
    past_value: Any,
    bias: Any,
    scale: float,
) -> tuple[Any, Any, Any]:
    """ONNX Runtime's Attention (1.31, CPU) multiplies head by head, and so reads the keys of a
    group again for each of its heads.  With few tokens that is what takes the time, so heads that
    share keys become tokens of one head, and queries [batch, kv heads * heads apart, heads together
    * tokens, size].  A prompt is read faster with heads apart, and the size of a call decides.
    """
    heads, kv_heads = query.shape[1], key.shape[1]
    apart = _heads_apart(query, kv_heads, heads // kv_heads, bias)
    if apart is None:
        found = op.Attention(query, key, value, bias, past_key, past_value, scale=scale)
        return found[0], found[1], found[2]
    rows = op.Mul(apart, _ints(kv_heads))
    split = op.Concat(_ints(0), rows, _ints(-1, query.shape[3]), axis=0)  # 0: as it is
    if bias is not None:
        keys = op.Concat(_ints(-1), op.Shape(bias, start=3, end=4), axis=0)
        if bias.shape[1] == 1:
            together = op.Div(_ints(heads // kv_heads), apart)
            times = op.Concat(_ints(1, 1), together, _ints(1, 1), axis=0)
            bias = op.Expand(op.Unsqueeze(bias, _ints(2)), times)
            bias = op.Reshape(bias, op.Concat(_ints(0, 1), keys, axis=0))
        else:
            bias = op.Reshape(bias, op.Concat(_ints(0), rows, keys, axis=0))
    found = op.Attention(
        op.Reshape(query, split), key, value, bias, past_key, past_value, scale=scale
    )
    joined = op.Reshape(found[0], _ints(0, heads, -1, value.shape[3]))
    return joined, found[1], found[2]


def _heads_apart(query: Any, kv_heads: int, group: int, bias: Any) -> Any:
    """How many heads of a group are multiplied one by one: a tensor [1] of int64; None: all of
    them, whatever the call.

    Which rows there are in a call decides no more than whether there are `MANY_ROWS`, so that a
    verification meets each form.
    """
    counts = [count for count in range(1, group + 1) if group % count == 0]
    alone, many = (
        next((n for n in counts if rows * kv_heads * n >= FEWEST_TASKS), group)
        for rows in (1, MANY_ROWS)
    )
    if many == group:
        return None
    # The mask is one for all layers, and so are the nodes that ask for its sizes.
    tokens = op.Shape(query, start=2, end=3) if bias is None else op.Shape(bias, start=2, end=3)
    found = _ints(many)
    if alone != many:
        of_mask = bias is not None and bias.shape[0] != 1
        rows = op.Shape(bias if of_mask else query, start=0, end=1)
        found = op.Where(op.GreaterOrEqual(rows, _ints(MANY_ROWS)), found, _ints(alone))
    return op.Where(op.LessOrEqual(tokens, _ints(FEW_TOKENS)), found, _ints(group))


def _ints(*numbers: int) -> Any:
    return op.Constant(value_ints=list(numbers))


@_translation(own.attention.default, readers=["tensorrt"])
def _attention_of_heads(
    query: Any,
    key: Any,
    value: Any,
    bias: Any,
    heads: int,
    kv_heads: int,
    scale: float,
    causal: bool,
) -> Any:
    """TensorRT's IAttention takes heads first; so they are split here, as its parser would (since
    10.14, onnx/onnx-tensorrt#1043, AttentionHelpers.cpp).
    """
    is_flat = len(query.shape) == 3
    if is_flat:
        query = _heads_first(query, heads)
        key, value = (_heads_first(found, kv_heads) for found in (key, value))
    found = _attend(query, key, value, bias, scale=scale, is_causal=int(causal))
    if not is_flat:
        return found
    flat = op.Constant(value_ints=[0, 0, -1])
    return op.Reshape(op.Transpose(found, perm=[0, 2, 1, 3]), flat)


def _attend(*inputs: Any, **attributes: Any) -> Any:
    results = op.Attention(*inputs, **attributes)
    return results[0] if isinstance(results, tuple | list) else results


def _heads_first(x: Any, heads: int) -> Any:
    """[batch, tokens, heads * size] -> [batch, heads, tokens, size]."""
    sizes = [0, 0, heads, x.shape[2] // heads]  # 0: as it is
    return op.Transpose(op.Reshape(x, op.Constant(value_ints=sizes)), perm=[0, 2, 1, 3])


@_translation(own.dynamic_scale.default)
def _dynamic_scale(x: Any, dtype: int, per_row: bool) -> Any:
    """Both ends are looked for: on ONNX Runtime 1.31's CPU provider that was measured to be cheaper
    than magnitudes, which are written first.
    """
    along = [op.Constant(value_ints=[-1])] if per_row else []
    lowest = op.Neg(op.ReduceMin(x, *along, keepdims=int(per_row)))
    largest = op.Max(op.ReduceMax(x, *along, keepdims=int(per_row)), lowest)
    scale = op.Div(_as(largest, _FLOAT), scalar(_LIMITS[ir.DataType(dtype)]))
    return op.Max(scale, scalar(SMALLEST_SCALE))


@_translation(own.quantize.default)
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
    scaled = op.Div(_as(x, _FLOAT), scale)
    if wanted == ir.DataType.INT8:
        scaled = op.Round(scaled)
    return op.Cast(op.Clip(scaled, scalar(-limit), scalar(limit)), to=int(wanted))


@_translation(own.quantize_unsigned.default, readers=_ONNXRUNTIME)
def _quantize_unsigned(x: Any, scale: Any, zeros: Any) -> Any:
    """Measured on ONNX Runtime 1.31's CPU provider: a block as long as the row is the fastest way
    to a scale for each row.
    """
    wide = _as(x, _FLOAT)
    if zeros is not None:
        return op.QuantizeLinear(wide, scale, zeros, axis=-1, block_size=x.shape[-1])
    found = op.QuantizeLinear(wide, scale, scalar(ZERO, ir.DataType.UINT8))
    return op.Clip(found, scalar(1, ir.DataType.UINT8))  # symmetric: 0 stands for -128


@_translation(own.dequantize.default)
def _dequantize(q: Any, scale: Any, dtype: int) -> Any:
    if len(scale.shape) == 0:
        return _as(op.DequantizeLinear(q, scale), ir.DataType(dtype))
    return _as(op.Mul(op.Cast(q, to=int(_FLOAT)), scale), ir.DataType(dtype))


@_translation(own.dequantize_axis.default)
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


@_translation(own.integer_linear.default, readers=["onnxruntime-cpu"])
def _integer_linear_on_cpu(
    x: Any, x_scale: Any, weight: Any, weight_scale: Any, bias: Any, dtype: int
) -> Any:
    zero = scalar(ZERO, ir.DataType.UINT8)
    if len(x_scale.shape) == 0:
        found = _integer_to_float(x, weight, x_scale, weight_scale, zero, None, bias)
        return _as(found, ir.DataType(dtype))
    one = scalar(1.0)
    found = _integer_to_float(x, weight, one, weight_scale, zero, None, None)
    found = op.Mul(found, x_scale)
    return _as(found if bias is None else op.Add(found, bias), ir.DataType(dtype))


@_translation(own.integer_linear.default, readers=["onnxruntime-cuda"])
def _integer_linear(
    x: Any, x_scale: Any, weight: Any, weight_scale: Any, bias: Any, dtype: int
) -> Any:
    found = op.Cast(op.MatMulInteger(x, weight), to=int(_FLOAT))
    found = op.Mul(op.Mul(found, x_scale), weight_scale)
    return _as(found if bias is None else op.Add(found, bias), ir.DataType(dtype))


@_translation(own.quantize_affine.default, readers=["onnxruntime-cpu"])
def _quantize_affine(x: Any, scale: Any, zero: int, dtype: int) -> Any:
    return op.QuantizeLinear(_as(x, _FLOAT), scale, scalar(zero, ir.DataType.UINT8))


@_translation(own.dequantize_affine.default, readers=["onnxruntime-cpu"])
def _dequantize_affine(q: Any, scale: Any, zero: int, dtype: int) -> Any:
    if len(scale.shape):
        channels = scale.shape[0]
        zeros = onnx.helper.make_tensor("zeros", int(q.dtype), [channels], [zero] * channels)
        scales = op.Reshape(scale, op.Constant(value_ints=[-1]))
        found = op.DequantizeLinear(q, scales, op.Constant(value=zeros), axis=1)
    else:
        found = op.DequantizeLinear(q, scale, scalar(zero, ir.DataType.UINT8))
    return _as(found, ir.DataType(dtype))


@_translation(own.quantized_conv.default, readers=["onnxruntime-cpu"])
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
        *(x, x_scale, scalar(x_zero, ir.DataType.UINT8)),
        *(weight, weight_scale, op.Constant(value=zeros)),
        *(y_scale, scalar(y_zero, ir.DataType.UINT8), bias),
        kernel_shape=list(weight.shape[2:]),
        strides=list(stride),
        pads=list(padding),
        dilations=list(dilation),
        group=groups,
    )
    return _limited(found, y_scale, y_zero, low, high)


@_translation(own.quantized_add.default, readers=["onnxruntime-cpu"])
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
    zeros = [scalar(zero, ir.DataType.UINT8) for zero in (left_zero, right_zero, y_zero)]
    sides = (left, left_scale, zeros[0], right, right_scale, zeros[1])
    found = _quantized_sum(*sides, y_scale, zeros[2])
    return _limited(found, y_scale, y_zero, low, high)


@_translation(own.quantized_lstm.default, readers=["onnxruntime-cpu"])
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
    found, last, memory = _dynamic_lstm(
        *(x, weight, recurrence, bias, None, hidden, cell, None),
        *(weight_scale, zero, recurrence_scale, zero),
        hidden_size=size,
        direction="bidirectional" if directions == 2 else "forward",
    )
    rows = op.Transpose(found, perm=[0, 2, 1, 3])
    return op.Reshape(rows, op.Constant(value_ints=[0, 0, directions * size])), last, memory


@_translation(aten.lstm.input, readers=_ONNXRUNTIME)
def _lstm(
    x: Any,
    start: Sequence[Any],
    weights: Sequence[Any],
    has_biases: bool,
    layers: int,
    dropout: float,
    train: bool,
    both_ways: bool,
    batch_first: bool,
) -> tuple[Any, Any, Any]:
    """torch's translation, but of a projection, which ONNX's LSTM has none of: a Scan for each
    direction of each layer.
    """
    from onnxscript.function_libs.torch_lib.ops.core import aten_lstm

    directions = 2 if both_ways else 1
    count = 4 if has_biases else 2
    if len(weights) == layers * directions * count:
        rest = (has_biases, layers, dropout, train, both_ways, batch_first)
        plain: tuple[Any, Any, Any] = aten_lstm(x, start, weights, *rest)
        return plain
    count += 1
    rows = op.Transpose(x, perm=[1, 0, 2]) if batch_first else x
    ends: list[tuple[Any, Any]] = []
    for _ in range(layers):
        outputs = []
        for backward in range(directions):
            place = len(ends)
            own_weights = weights[place * count : (place + 1) * count]
            first = [op.Gather(each, scalar(place, ir.DataType.INT64)) for each in start]
            batch = start[0].shape[1]
            found, *last = _projected_direction(rows, first, own_weights, batch, bool(backward))
            outputs.append(found)
            ends.append((last[0], last[1]))
        rows = op.Concat(*outputs, axis=-1) if both_ways else outputs[0]
    axis = op.Constant(value_ints=[0])
    state, cell = (
        op.Concat(*(op.Unsqueeze(each, axis) for each in some), axis=0)
        for some in zip(*ends, strict=True)
    )
    return op.Transpose(rows, perm=[1, 0, 2]) if batch_first else rows, state, cell


def _rnn(activation: str) -> Callable[..., tuple[Any, Any]]:
    """The translation of such layers, of which torch has none."""

    def translate(
        x: Any,
        start: Any,
        weights: Sequence[Any],
        has_biases: bool,
        layers: int,
        dropout: float,
        train: bool,
        both_ways: bool,
        batch_first: bool,
    ) -> tuple[Any, Any]:
        directions = 2 if both_ways else 1
        count = 4 if has_biases else 2
        rows = op.Transpose(x, perm=[1, 0, 2]) if batch_first else x
        axis = op.Constant(value_ints=[0])
        ends = []
        for first in range(0, layers * directions, directions):
            places = [place * count for place in range(first, first + directions)]
            kinds = [[weights[place + kind] for place in places] for kind in range(count)]
            held = [op.Concat(*(op.Unsqueeze(w, axis) for w in kind), axis=0) for kind in kinds]
            bias = op.Concat(held[2], held[3], axis=1) if has_biases else None
            before = op.Slice(start, [first], [first + directions], axis)
            found, last = op.RNN(
                *(rows, held[0], held[1], bias, None, before),
                activations=[activation] * directions,
                direction="bidirectional" if both_ways else "forward",
                hidden_size=kinds[1][0].shape[-1],
            )
            by_row = op.Transpose(found, perm=[0, 2, 1, 3])  # from [S, directions, B, H]
            rows = op.Reshape(by_row, op.Constant(value_ints=[0, 0, -1]))
            ends.append(last)
        rows = op.Transpose(rows, perm=[1, 0, 2]) if batch_first else rows
        return rows, op.Concat(*ends, axis=0)

    return translate


_translation(aten.rnn_tanh.input)(_rnn("Tanh"))
_translation(aten.rnn_relu.input)(_rnn("Relu"))


_HOP = "torch.onnx._internal.exporter._torchlib.ops.hop"


def _projected_direction(
    rows: Any, first: Sequence[Any], weights: Sequence[Any], batch: Any, backward: bool
) -> Sequence[Any]:
    """One direction of a layer, [S, B, P], and its last state [B, P] and cell [B, H].

    Args:
        first: state and cell before the first step.
        weights: of the input, of the state, perhaps biases of both, and the projection [P, H].
        batch: B.
    """
    call_op = private(f"{_HOP}.call_op", "an LSTM")
    of_input, of_state, *biases, projection = weights
    given = op.MatMul(rows, op.Transpose(of_input, perm=[1, 0]))
    for bias in biases:
        given = op.Add(given, bias)
    turned = [op.Transpose(each, perm=[1, 0]) for each in (of_state, projection)]
    state, cell = first
    way = [1 if backward else 0]
    state, cell, found = call_op(
        *("Scan", state, cell, given),
        _num_outputs=3,
        body=_lstm_step(batch, projection, turned),
        num_scan_inputs=1,
        scan_input_directions=way,
        scan_output_directions=way,
    )
    return found, state, cell


def _lstm_step(batch: Any, projection: Any, kept: Sequence[Any]) -> ir.Graph:
    """The body of the Scan: from state, cell, and the products of one step of the input to the next
    state and cell, and the state once more.
    """
    shown_size, size = projection.shape
    shown_shape, shape = [batch, shown_size], [batch, size]
    body = _Body("lstm", projection.dtype)
    add = body.add
    state, cell = body.value("state", shown_shape), body.value("cell", shape)
    given = body.value("given", [batch, 4 * size])
    gates = add("Add", given, add("MatMul", state, kept[0]))
    enters, forgets, new, leaves = add("Split", gates, count=4, axis=-1, num_outputs=4)
    entered = add("Mul", add("Sigmoid", enters), add("Tanh", new))
    following = add("Add", add("Mul", add("Sigmoid", forgets), cell), entered)
    shown = add("MatMul", add("Mul", add("Sigmoid", leaves), add("Tanh", following)), kept[1])
    outputs = [(shown, shown_shape), (following, shape), (add("Identity", shown), shown_shape)]
    return body.graph((state, cell, given), outputs)


@_translation(own.quantized_gru.default, readers=["onnxruntime-cpu"])
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
    call_op = private(f"{_HOP}.call_op", "a quantized GRU")
    given = _dynamic_product(x, weight, weight_scale, None, bias)
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
    body = _Body("gru", _FLOAT)
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


class _Body:
    """The graph of a step, whose values are all of one dtype."""

    def __init__(self, name: str, dtype: ir.DataType) -> None:
        self._name = name
        self._type = ir.TensorType(dtype)
        self._nodes: list[ir.Node] = []

    def value(self, name: str, shape: Sequence[Any]) -> ir.Value:
        """An input."""
        return ir.Value(name=f"{self._name}_{name}", shape=ir.Shape(shape), type=self._type)

    def add(
        self, kind: str, *read: ir.Value | None, domain: str = "", count: int = 1, **more: Any
    ) -> Any:
        """The result of an op, or its `count` results."""
        attributes = ir.convenience.convert_attributes(more)
        node = ir.Node(domain, kind, read, attributes, num_outputs=count)
        for place, value in enumerate(node.outputs):
            value.name = f"{self._name}_{len(self._nodes)}_{place}"
            value.type = self._type
        self._nodes.append(node)
        return node.outputs[0] if count == 1 else node.outputs

    def graph(
        self, inputs: Sequence[ir.Value], outputs: Sequence[tuple[ir.Value, Sequence[Any]]]
    ) -> ir.Graph:
        """Of all ops, with outputs of these shapes."""
        for value, shape in outputs:
            value.shape = ir.Shape(shape)
        values = [value for value, _ in outputs]
        return ir.Graph(inputs, values, nodes=self._nodes, name=f"{self._name}_step")


def _limited(values: Any, scale: Any, zero: int, low: float | None, high: float | None) -> Any:
    """Unsigned values of what is within two limits: the steps at which these lie.  A limit of 0
    that the lowest step stands for is there already.
    """
    if low == 0 and zero == 0:
        low = None
    if low is None and high is None:
        return values
    uint8 = ir.DataType.UINT8
    ends = [
        None if limit is None else op.QuantizeLinear(scalar(limit), scale, scalar(zero, uint8))
        for limit in (low, high)
    ]
    return op.Clip(values, *ends)


@_translation(own.packed_linear.default, readers=_ONNXRUNTIME)
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


@_translation(own.fp8_gemm.default, readers=["onnxruntime-cuda"])
def _fp8_gemm(x: Any, x_scale: Any, weight: Any, weight_scale: Any, bias: Any, dtype: int) -> Any:
    """GemmFloat8 takes matrices, and one scale for each; scales of rows follow it, in fp32."""
    rows, size = weight.shape
    flat = op.Reshape(x, op.Constant(value_ints=[-1, size]))
    in_gemm = [found if len(found.shape) == 0 else None for found in (x_scale, weight_scale)]
    scales = [scalar(1.0) if found is None else found for found in in_gemm]
    whole = None not in in_gemm and bias is None
    kind = dtype if whole else int(_FLOAT)
    found = _gemm_float8(flat, weight, None, *scales, transB=1, dtype=kind)
    shape = op.Concat(op.Shape(x, end=-1), op.Constant(value_ints=[rows]), axis=0)
    found = op.Reshape(found, shape)
    for scale, inside in zip((x_scale, weight_scale), in_gemm, strict=True):
        found = found if inside is not None else op.Mul(found, scale)
    found = found if bias is None else op.Add(found, bias)
    return found if whole else _as(found, ir.DataType(dtype))


@_translation(own.values_of_bytes.default, readers=_ONNXRUNTIME)
def _values_of_bytes(raw: Any, table: Any) -> Any:
    return op.Gather(table, op.Cast(raw, to=int(ir.DataType.INT32)))


def _grouped_mm(rows: Any, weight: Any, offs: Any) -> Any:
    """A mixture of experts: rows that are sorted by expert, times the weights of their expert.

    transformers computes it with one grouped product, and ONNX has none.  The number of experts is
    known, so it is one product for each over the rows that were routed to it, which may be none.

    Args:
        rows: [rows, in].
        weight: [experts, in, out].
        offs: [experts]: where the rows of each expert end.
    """
    experts = weight.shape[0]
    zero = op.Constant(value_ints=[0])
    ends = op.Cast(offs, to=7)
    weights = op.Split(weight, axis=0, num_outputs=experts) if experts > 1 else [weight]
    stops = op.Split(ends, axis=0, num_outputs=experts) if experts > 1 else [ends]
    starts = [zero, *stops[: experts - 1]]
    products = [
        op.MatMul(op.Slice(rows, starts[i], stops[i], zero), op.Squeeze(weights[i], zero))
        for i in range(experts)
    ]
    return op.Concat(*products, axis=0)


def _while_loop(
    condition: Any, body: Any, carried: Sequence[Any], additional: Sequence[Any]
) -> Sequence[Any]:
    """torch's own translation, with its one wrong number put right.

    It calls the condition before the loop as a function of opset 23's version, and all other calls
    have version 1.  torch's inliner refuses a model whose loop holds a branch or another loop then
    ("Opset mismatch when inlining function", torch 2.13).
    """
    translate = private(f"{_HOP}.higher_order_while_loop", "a loop")
    results: Sequence[Any] = translate(condition, body, carried, additional)
    results[0].producer().inputs[1].producer().version = None
    return results


def translation_table(*, reader: Reader) -> dict[Translation, Translation]:
    """The table for `torch.onnx.export(custom_translation_table=...)`."""
    table: dict[Translation, Translation] = dict(TRANSLATIONS[reader])
    experts = getattr(torch.ops.transformers, "grouped_mm_fallback", None)
    if experts is not None:  # transformers has registered it: a model has it
        table[experts.default] = _grouped_mm
    table[higher_order("while_loop")] = _while_loop
    return {op: rule for op, rule in table.items() if not isinstance(op, MissingOperator)}


_INTO_FORMS = (own.quantized_linear.default, own.blockwise_linear.default)
_OF_WEIGHTS = (own.quantize_blocks.default, own.pack_blocks.default)
_OF_ONNXRUNTIME = (
    *(own.quantize_unsigned.default, own.integer_linear.default, own.fp8_gemm.default),
    *(own.packed_linear.default, own.values_of_bytes.default),
)
for _rules in TRANSLATIONS.values():
    _rules.refuse(*_INTO_FORMS, reason="legalize-quantized gives it another form")
    _rules.refuse(*_OF_WEIGHTS, reason="it computes weights, while the file is written")
_OF_CONVS = (
    *(own.quantize_affine.default, own.dequantize_affine.default),
    *(own.quantized_conv.default, own.quantized_add.default),
    *(own.quantized_lstm.default, own.quantized_gru.default),
)
for _reader in READERS:
    if _reader != "onnxruntime-cpu":
        TRANSLATIONS[_reader].refuse(*_OF_CONVS, reason="ONNX Runtime has it on the CPU alone")
for _reader in READERS:
    if _reader != "onnxruntime-cpu":
        TRANSLATIONS[_reader].refuse(
            own.cached_attention.default, reason="append-cache makes it for ONNX Runtime's CPU"
        )
for _reader in _PLAIN:
    TRANSLATIONS[_reader].refuse(*_OF_ONNXRUNTIME, reason="a form for ONNX Runtime")
TRANSLATIONS["onnxruntime-cpu"].refuse(own.fp8_gemm.default, reason="only CUDA has GemmFloat8")
