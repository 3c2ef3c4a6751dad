"""Pairs of graphs for the rules of the TensorRT gate: one that keeps a rule, one that breaks it."""

from dataclasses import dataclass, field
from typing import Any

import onnx_ir as ir
from tensorrt_graphs import DOUBLE, E4M3, FLOAT, HALF, INT8, INT64

Constants = dict[str, tuple[Any, ir.DataType]]
HALVES = "(float16[batch, 4] x) => (float16[batch, 4] y)"
FLOATS = "(float[batch, 4] x) => (float[batch, 4] y)"
QDQ = f"{HALVES} {{ q = QuantizeLinear <output_dtype = 17> (x, s) y = DequantizeLinear(q, s) }}"
SCALE: Constants = {"s": (0.5, HALF)}
WEIGHT: Constants = {"w": ([[1.0, 2.0]] * 4, E4M3)}
PRODUCT = """(float16[batch, 4] x) => (float16[batch, 2] y) {
    q = QuantizeLinear <output_dtype = 17> (x, s)
    a = DequantizeLinear(q, s)
    b = DequantizeLinear <axis = 1> (w, t)
    y = MatMul(a, b)
}"""
ATTENTION = """(float16[batch, 4, sequence, 8] q, float16[batch, 4, sequence, 8] k,
    MASK m) => (float16[batch, 4, sequence, 8] y) { y = Attention ATTRIBUTES (q, k, k, m) }"""
LOOP = """(float[batch] x, bool c) => (float[AFTER] y) {
    n = Constant <value_int = 3> ()
    y = Loop (n, c, x) <body = b (int64 i, bool d, float[BEFORE] v)
    => (bool e, float[AFTER] w) { e = Identity(d) w = Concat <axis = 0> (VALUES) }>
}"""
BRANCH = """(bool c, float[batch] x) => (float[batch] y) {
    y = If (c) <then_branch = one () => (float[batch] a) { a = Relu(x) },
                else_branch = two () => (float[OTHER] b) { b = OP(x) }>
}"""
ORDER = "(float[batch, 4000] x) => (float[batch, k] y, int64[batch, k] z) { y, z = TopK(x, n) }"


@dataclass(frozen=True)
class Case:
    """Two graphs that differ in what a rule is of."""

    rule: str
    good: str
    bad: str
    got: str
    """Is in the violation."""
    constants: Constants = field(default_factory=dict)
    broken: Constants = field(default_factory=dict)
    """Of the bad graph, where they differ."""
    narrowed: bool = False
    """The parser takes the bad one, and makes another network of it."""


def attention(attributes: str = "") -> str:
    mask = "bool[batch, 1, sequence, sequence]"
    return ATTENTION.replace("MASK", mask).replace("ATTRIBUTES", attributes)


def loop(before: str, after: str, values: str) -> str:
    return LOOP.replace("BEFORE", before).replace("AFTER", after).replace("VALUES", values)


OPERATORS = [
    Case("operator", f"{FLOATS} {{ y = Relu(x) }}", f"{FLOATS} {{ y = Det(x) }}", "no importer"),
    Case(
        "attribute",
        attention("<softcap = 0.0>"),
        attention("<softcap = 30.0>"),
        "softcap: Setting softcap is not supported",
    ),
    Case("attribute", attention(), attention("<is_causal = 1>"), "is_causal=1 & input 3"),
    Case(
        "rank",
        "(float[batch, 4] x) => (float[batch, 4] y) { y = Softmax(x) }",
        "(float[batch] x) => (float[batch] y) { y = Softmax(x) }",
        "rank 1: at least 2 dimensions",
    ),
    Case(
        "count",
        f"{FLOATS} {{ y = LayerNormalization(x, w) }}",
        "(float[batch, 4] x) => (float[batch, 4] y, float[batch, 1] z)"
        " { y, z = LayerNormalization(x, w) }",
        "output 1",
        {"w": ([1, 2, 3, 4], FLOAT)},
    ),
    Case(
        "constant",
        "(float[batch, 4] x) => (float[batch, 1] y) { y = ReduceSum(x, n) }",
        "(float[batch, 4] x, int64[1] m) => (float[batch, 1] y) { y = ReduceSum(x, m) }",
        "computed 1: Axis input must resolve",
        {"n": ([1], INT64)},
        {"n": ([1], INT64)},
    ),
    Case("limit", ORDER, ORDER, "3841", {"n": ([3840], INT64)}, {"n": ([3841], INT64)}),
    Case(
        "fixed-input",
        "(float[4, 4] x) => (float[4, 4] y) { y = EyeLike(x) }",
        "(float[batch, 4] x) => (float[batch, 4] y) { y = EyeLike(x) }",
        "Eyelike does not work for dynamically shaped tensors",
    ),
    Case(
        "branch-ranks",
        BRANCH.replace("OTHER", "batch").replace("OP", "Neg"),
        BRANCH.replace("OTHER", "1, batch").replace("OP(x)", "Unsqueeze(x, i)"),
        "1 of a, 2 of b",
        broken={"i": ([0], INT64)},
    ),
    Case(
        "carried-shapes",
        loop("batch", "batch", "v"),
        loop("before", "after", "v, v"),
        "[after] of w",
    ),
]

TYPES = [
    Case(
        "types",
        "(float[batch] x) => (float[batch] y) { y = Cos(x) }",
        "(uint8[batch] x) => (uint8[batch] y) { y = Add(x, x) }",
        "UINT8",
    ),
    Case(
        "types",
        "(int32[batch] x) => (int32[batch] y) { y = Add(x, x) }",
        "(int16[batch] x) => (int16[batch] y) { y = Add(x, x) }",
        "INT16",
    ),
    Case(
        "types",
        QDQ,
        f"{HALVES} {{ q = Cast <to = 17> (x) y = DequantizeLinear(q, s) }}",
        "FP16 and FP8: builder: a tensor has datatype FP8 but is not produced",
        SCALE,
    ),
    Case("types", QDQ, QDQ.replace("17", "19"), "FLOAT8E5M2", SCALE),
    Case("types", QDQ.replace("17", "3"), QDQ.replace("17", "2"), "only allows FP8, INT8", SCALE),
    Case(
        "types",
        "(float16[1, 4, 8, 8] x) => (float16[1, 4, 10, 10] y) { y = ConvTranspose(x, w) }",
        "(bfloat16[1, 4, 8, 8] x) => (bfloat16[1, 4, 10, 10] y) { y = ConvTranspose(x, w) }",
        "BF16: builder: Could not infer output types",
        {"w": ([[[[1.0] * 3] * 3] * 4] * 4, HALF)},
        {"w": ([[[[1.0] * 3] * 3] * 4] * 4, ir.DataType.BFLOAT16)},
    ),
    Case(
        "float64",
        "(float[batch] x) => (float[batch] y) { y = Add(x, w) }",
        "(double[batch] x) => (double[batch] y) { y = Add(x, w) }",
        "DOUBLE",
        {"w": ([1.0], FLOAT)},
        {"w": ([1.0], DOUBLE)},
        narrowed=True,
    ),
    Case(
        "mixed-types",
        f"{HALVES} {{ y = Add(x, w) }}",
        f"{HALVES} {{ y = Add(x, w) }}",
        "FLOAT16 of x, FLOAT of w",
        {"w": ([1, 2, 3, 4], HALF)},
        {"w": ([1, 2, 3, 4], FLOAT)},
    ),
]

QUANTIZED = [
    Case("scale-positive", QDQ, QDQ, "-0.5 in s", SCALE, {"s": (-0.5, HALF)}),
    Case(
        "scale-shape",
        PRODUCT,
        PRODUCT,
        "got 4",
        {**SCALE, **WEIGHT, "t": ([1, 2], HALF)},
        {**SCALE, **WEIGHT, "t": ([1, 2, 3, 4], HALF)},
    ),
    Case(
        "zero-point",
        f"{HALVES} {{ q = QuantizeLinear(x, s, z) y = DequantizeLinear(q, s, z) }}",
        f"{HALVES} {{ q = QuantizeLinear(x, s, z) y = DequantizeLinear(q, s, z) }}",
        "z, which is not zero",
        {**SCALE, "z": (0, INT8)},
        {**SCALE, "z": (3, INT8)},
    ),
]
CASES = [*OPERATORS, *TYPES, *QUANTIZED]
