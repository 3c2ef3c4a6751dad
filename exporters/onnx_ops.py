"""How our FX ops are said in ONNX: a translation table for torch.onnx.export.

com.microsoft ops have no schema in the onnx package, and the exporter needs one to type them: the
schemas here are handed to it directly, without registering anything globally.
"""

from collections.abc import Callable
from typing import Any

import onnx
import onnxscript
import torch
from onnx.defs import OpSchema
from onnxscript import opset23 as op

from enginecast.exporters.onnx_experts import expert_translations
from enginecast.exporters.onnx_loops import loop_translations
from enginecast.exporters.onnx_numbers import number_translations
from enginecast.exporters.onnx_quantized import quantized_translations
from enginecast.exporters.readers import Reader

MICROSOFT = onnxscript.values.Opset("com.microsoft", 1)
_FLOATS = ["tensor(float)", "tensor(float16)", "tensor(bfloat16)"]
_OPTIONAL = OpSchema.FormalParameterOption.Optional


def _inputs(*names: str, optional: tuple[str, ...] = ()) -> list[OpSchema.FormalParameter]:
    required = [OpSchema.FormalParameter(name, "T") for name in names]
    return required + [OpSchema.FormalParameter(n, "T", param_option=_OPTIONAL) for n in optional]


# Sources: onnxruntime docs/ContribOperators.md, com.microsoft.SkipSimplifiedLayerNormalization and
# .MultiHeadAttention.
_SKIP_NORM = OpSchema(
    "SkipSimplifiedLayerNormalization",
    "com.microsoft",
    1,
    inputs=_inputs("input", "skip", "gamma", optional=("bias",)),
    outputs=[
        OpSchema.FormalParameter("output", "T"),
        OpSchema.FormalParameter("mean", "U", param_option=_OPTIONAL),
        OpSchema.FormalParameter("inv_std_var", "U", param_option=_OPTIONAL),
        OpSchema.FormalParameter("input_skip_bias_sum", "T", param_option=_OPTIONAL),
    ],
    type_constraints=[("T", _FLOATS, ""), ("U", ["tensor(float)"], "")],
    attributes=[OpSchema.Attribute("epsilon", OpSchema.AttrType.FLOAT)],
)
_MULTI_HEAD = OpSchema(
    "MultiHeadAttention",
    "com.microsoft",
    1,
    inputs=[
        *_inputs("query", optional=("key", "value", "bias")),
        OpSchema.FormalParameter("key_padding_mask", "M", param_option=_OPTIONAL),
        *_inputs(optional=("attention_bias",)),
    ],
    outputs=[OpSchema.FormalParameter("output", "T")],
    type_constraints=[("T", _FLOATS, ""), ("M", ["tensor(int32)"], "")],
    attributes=[
        OpSchema.Attribute("num_heads", OpSchema.AttrType.INT),
        OpSchema.Attribute("scale", OpSchema.AttrType.FLOAT),
    ],
)
_skip_norm_op = onnxscript.values.Op(MICROSOFT, _SKIP_NORM.name, _SKIP_NORM)
_multi_head_op = onnxscript.values.Op(MICROSOFT, _MULTI_HEAD.name, _MULTI_HEAD)


def _skip_rms_norm(x: Any, residual: Any, weight: Any, epsilon: float) -> tuple[Any, Any]:
    results = _skip_norm_op(x, residual, weight, epsilon=epsilon)
    return results[0], results[3]


def _add_and_norm(x: Any, residual: Any, weight: Any, epsilon: float) -> tuple[Any, Any]:
    """The same in ops of ONNX's own."""
    total = op.Add(x, residual)
    return op.RMSNormalization(total, weight, axis=-1, epsilon=epsilon), total


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
        eps = torch.finfo(_DTYPES[input.dtype.name]).eps
    return op.RMSNormalization(input, weight, axis=-len(normalized_shape), epsilon=eps)


_DTYPES = {"FLOAT": torch.float32, "FLOAT16": torch.float16, "BFLOAT16": torch.bfloat16}


def _attention(reader: Reader) -> Callable[..., Any]:
    """Choose the op.  On ONNX Runtime's CPU provider Attention (opset 23) was measured to be the
    faster one with a bias and MultiHeadAttention without.  The CUDA provider has kernels of
    Attention for fp16 and bf16 (microsoft/onnxruntime#27542, older than the oldest version taken).

    A row whose keys are all masked belongs to padding.  Attention (ONNX Runtime 1.31, CPU) writes
    zeros there, where torch does so for -inf and averages the values for the lowest number.

    TensorRT's IAttention takes heads first; so they are split here, as its parser would (since
    10.14, onnx/onnx-tensorrt#1043, AttentionHelpers.cpp).
    """

    def translate(
        query: Any,
        key: Any,
        value: Any,
        bias: Any,
        heads: int,
        kv_heads: int,
        scale: float,
        causal: bool,
    ) -> Any:
        rank = len(query.shape)
        plain = bias is None and rank == 3 and heads == kv_heads and not causal
        if plain and reader == "onnxruntime-cpu":
            return _multi_head_op(query, key, value, num_heads=heads, scale=scale)
        flat = rank == 3 and reader == "tensorrt"
        if flat:
            query = _heads_first(query, heads)
            key, value = (_heads_first(found, kv_heads) for found in (key, value))
            rank = 4
        counts = {"q_num_heads": heads, "kv_num_heads": kv_heads} if rank == 3 else {}
        results = op.Attention(
            query, key, value, bias, scale=scale, is_causal=int(causal), **counts
        )
        result = results[0] if isinstance(results, tuple | list) else results
        return _heads_last(result) if flat else result

    return translate


def _heads_first(x: Any, heads: int) -> Any:
    """[batch, tokens, heads * size] -> [batch, heads, tokens, size]."""
    sizes = [0, 0, heads, x.shape[2] // heads]  # 0: as it is
    return op.Transpose(op.Reshape(x, op.Constant(value_ints=sizes)), perm=[0, 2, 1, 3])


def _heads_last(x: Any) -> Any:
    together = op.Constant(value_ints=[0, 0, -1])
    return op.Reshape(op.Transpose(x, perm=[0, 2, 1, 3]), together)


def translation_table(*, reader: Reader) -> dict[Callable[..., Any], Callable[..., Any]]:
    """The table for `torch.onnx.export(custom_translation_table=...)`.

    Args:
        reader: which attention op is the faster one there; TensorRT has no com.microsoft ops.
    """
    return {
        torch.ops.enginecast.skip_rms_norm.default: (
            _add_and_norm if reader == "tensorrt" else _skip_rms_norm
        ),
        torch.ops.enginecast.attention.default: _attention(reader),
        torch.ops.aten.rms_norm.default: _rms_norm,
        **expert_translations(),
        **loop_translations(),
        **number_translations(),
        **quantized_translations(reader=reader),
    }
