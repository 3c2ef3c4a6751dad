"""Ops of com.microsoft, which ONNX Runtime alone has, and one of TensorRT's parser.

They have no schema in the onnx package, and torch.onnx needs one to type them: the schemas here are
handed to it directly, without registering anything globally.  They are those of onnxruntime
docs/ContribOperators.md, and of onnx/onnx-tensorrt, onnxOpImporters.cpp.
"""

from collections.abc import Mapping

import onnxscript
from onnx.defs import OpSchema

_MICROSOFT = onnxscript.values.Opset("com.microsoft", 1)
_TENSORRT = onnxscript.values.Opset("trt", 1)

_INT, _REAL = OpSchema.AttrType.INT, OpSchema.AttrType.FLOAT

_FLOATS = ["tensor(float)", "tensor(float16)", "tensor(bfloat16)"]

_UINT8 = ["tensor(uint8)"]

_INT8 = ["tensor(int8)", *_UINT8]

_ANY = ["tensor(float8e4m3fn)", "tensor(float8e5m2)", *_FLOATS]


def _op(
    name: str,
    inputs: str,
    types: Mapping[str, list[str]],
    attributes: Mapping[str, OpSchema.AttrType],
    *,
    required: int,
    outputs: str,
    opset: onnxscript.values.Opset = _MICROSOFT,
) -> onnxscript.values.Op:
    """An op of com.microsoft, or of another domain.

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
        opset.domain,
        1,
        inputs=parameters(inputs, required),
        outputs=parameters(outputs, 1),
        type_constraints=[(key, allowed, "") for key, allowed in types.items()],
        attributes=[OpSchema.Attribute(n, kind, required=False) for n, kind in attributes.items()],
    )
    return onnxscript.values.Op(opset, name, schema)


skip_norm = _op(
    "SkipSimplifiedLayerNormalization",
    "input:T skip:T gamma:T bias:T",
    {"T": _FLOATS, "U": ["tensor(float)"]},
    {"epsilon": _REAL},
    required=3,
    outputs="output:T mean:U inv_std_var:U input_skip_bias_sum:T",
)

multi_head_attention = _op(
    "MultiHeadAttention",
    "query:T key:T value:T bias:T key_padding_mask:M attention_bias:T",
    {"T": _FLOATS, "M": ["tensor(int32)"]},
    {"num_heads": _INT, "scale": _REAL},
    required=1,
    outputs="output:T",
)

integer_to_float = _op(
    "MatMulIntegerToFloat",
    "A:T1 B:T2 a_scale:T3 b_scale:T3 a_zero_point:T1 b_zero_point:T2 bias:T3",
    {"T1": _INT8, "T2": _INT8, "T3": ["tensor(float)", "tensor(float16)"]},
    {},
    required=4,
    outputs="Y:T3",
)

dynamic_product = _op(
    "DynamicQuantizeMatMul",
    "A:T1 B:T2 b_scale:T1 b_zero_point:T2 bias:T1",
    {"T1": ["tensor(float)"], "T2": _INT8},
    {},
    required=3,
    outputs="Y:T1",
)

quantized_sum = _op(
    "QLinearAdd",
    "A:T A_scale:S A_zero_point:T B:T B_scale:S B_zero_point:T C_scale:S C_zero_point:T",
    {"T": _UINT8, "S": ["tensor(float)"]},
    {},
    required=8,
    outputs="C:T",
)

dynamic_lstm = _op(
    "DynamicQuantizeLSTM",
    "X:T W:T2 R:T2 B:T sequence_lens:T1 initial_h:T initial_c:T P:T W_scale:T W_zero_point:T2"
    " R_scale:T R_zero_point:T2",
    {"T": ["tensor(float)"], "T1": ["tensor(int32)"], "T2": _INT8},
    {"hidden_size": _INT, "direction": OpSchema.AttrType.STRING},
    required=3,
    outputs="Y:T Y_h:T Y_c:T",
)

nbits_product = _op(
    "MatMulNBits",
    "A:T1 B:T2 scales:T1 zero_points:T3 g_idx:T4 bias:T1",
    {"T1": _FLOATS, "T2": _UINT8, "T3": [*_UINT8, *_FLOATS], "T4": ["tensor(int32)"]},
    dict.fromkeys(("K", "N", "bits", "block_size", "accuracy_level"), _INT),
    required=3,
    outputs="Y:T1",
)

gemm_float8 = _op(
    "GemmFloat8",
    "A:TA B:TB C:TC scaleA:TS scaleB:TS scaleY:TS",
    {"TA": _ANY, "TB": _ANY, "TC": _FLOATS, "TS": ["tensor(float)"], "TR": _ANY},
    {"transA": _INT, "transB": _INT, "dtype": _INT, "alpha": _REAL, "beta": _REAL},
    required=2,
    outputs="Y:TR",
)

mx_dequantize = _op(
    "TRT_MXFP8DequantizeLinear",
    "x:T x_scale:S",
    {"T": ["tensor(float8e4m3fn)"], "S": _UINT8, "R": _FLOATS},
    {"axis": _INT, "block_size": _INT, "output_dtype": _INT},
    required=2,
    outputs="y:R",
    opset=_TENSORRT,
)
