"""Pairs of graphs for the rules of the TensorRT gate: one that keeps a rule, one that breaks it."""

from dataclasses import dataclass, field
from typing import Any

import onnx_ir as ir
from tensorrt_graphs import DOUBLE, E4M3, FLOAT, HALF, INT4, INT64

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
BLOCKS = """(float16[batch, 128] x) => (float16[batch, 2] y) {
    b = DequantizeLinear <axis = 0, block_size = 64> (w, t)
    y = MatMul(x, b)
}"""
ATTENTION = """(float16[batch, 4, sequence, 8] q, float16[batch, 4, sequence, 8] k,
    MASK m) => (float16[batch, 4, sequence, 8] y) { y = Attention ATTRIBUTES (q, k, k, m) }"""
FLAT = """(float16[batch, sequence, 32] q, float16[batch, sequence, 16] k)
    => (float16[batch, sequence, 32] y) { y = Attention <q_num_heads = 4COUNTS> (q, k, k) }"""
LOOP = """(float[batch] x, bool c, int64 n) => (float[batch] y) {
    n2 = Constant <value_int = 3> ()
    y OUTPUT = Loop (n, c, x) <body = b (int64 i, bool d, float[BEFORE] v)
    => (bool e, float[AFTER] w GIVEN) { e = Identity(d) w = Relu(v) }>
}"""
BRANCH = """(bool c, float[batch] x) => (float[batch] y) {
    y = If (c) <then_branch = one () => (float[batch] a) { a = Relu(x) },
                else_branch = two () => (float[OTHER] b) { b = OP(x) }>
}"""


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


def attention(mask: str = "bool[batch, 1, sequence, sequence]", attributes: str = "") -> str:
    return ATTENTION.replace("MASK", mask).replace("ATTRIBUTES", attributes)


OPERATORS = [
    Case(
        "operator",
        f"{FLOATS} {{ y = Relu(x) }}",
        f"{FLOATS} {{ y = Swish(x) }}",
        "documented since TensorRT 11.0",
    ),
    Case(
        "domain",
        f"{FLOATS} {{ y = Gelu(x) }}",
        f"{FLOATS} {{ y = com.microsoft.Gelu(x) }}",
        "com.microsoft",
    ),
    Case(
        "attribute",
        "(float[batch, 2, 4, 4] x) => (float[batch, 2, 8, 8] y)"
        ' { y = Resize <mode = "linear"> (x, , , n) }',
        "(float[batch, 2, 4, 4] x) => (float[batch, 2, 8, 8] y)"
        ' { y = Resize <mode = "cubic"> (x, , , n) }',
        "cubic",
        {"n": ([1, 2, 8, 8], INT64)},
    ),
    Case(
        "rank",
        "(float[batch, 2, 8, 8] x) => (float[batch, 2, 7, 7] y)"
        " { y = AveragePool <kernel_shape = [2, 2]> (x) }",
        "(float[batch, 2, 8] x) => (float[batch, 2, 7] y)"
        " { y = AveragePool <kernel_shape = [2]> (x) }",
        "3 of x",
    ),
    Case(
        "count",
        f"{FLOATS} {{ y = LayerNormalization(x, w) }}",
        "(float[batch, 4] x) => (float[batch, 4] y, float[batch, 1] z)"
        " { y, z = LayerNormalization(x, w) }",
        "z",
        {"w": ([1, 2, 3, 4], FLOAT)},
    ),
    Case(
        "constant",
        "(float[batch, 4] x) => (float[batch, 1] y) { y = ReduceSum(x, n) }",
        "(float[batch, 4] x, int64[1] m) => (float[batch, 1] y) { y = ReduceSum(x, m) }",
        "m, which is computed",
        {"n": ([1], INT64)},
        {"n": ([1], INT64)},
    ),
    Case(
        "limit",
        "(float[batch, 4000] x) => (float[batch, k] y, int64[batch, k] z) { y, z = TopK(x, n) }",
        "(float[batch, 4000] x) => (float[batch, k] y, int64[batch, k] z) { y, z = TopK(x, n) }",
        "3840",
        {"n": ([3839], INT64)},
        {"n": ([3840], INT64)},
    ),
    Case(
        "mask-or-causal",
        attention(),
        attention(attributes="<is_causal = 1>"),
        "both",
    ),
    Case(
        "mask-shape",
        attention("float16[1, 1, sequence, sequence]"),
        attention("float16[batch, 1, 1, sequence]"),
        "1 x sequence",
    ),
    Case(
        "heads", FLAT.replace("COUNTS", ", kv_num_heads = 2"), FLAT.replace("COUNTS", ""), "[4, 0]"
    ),
    Case(
        "data-dependent",
        "(bool[batch] x) => (int64[1] y) { y = Shape(x) }",
        "(bool[batch] x) => (int64[1, found] y) { y = NonZero(x) }",
        "as many as the values make it",
    ),
    Case(
        "fixed-input",
        "(float[4, 4] x) => (float[4, 4] y) { y = EyeLike(x) }",
        "(float[batch, 4] x) => (float[batch, 4] y) { y = EyeLike(x) }",
        "batch",
    ),
    Case(
        "branch-ranks",
        BRANCH.replace("OTHER", "batch").replace("OP", "Neg"),
        BRANCH.replace("OTHER", "").replace("float[] b", "float b").replace("OP", "ReduceMax"),
        "1 of a, 0 of b",
    ),
]


def loop(trips: str, before: str = "batch", after: str = "batch", collect: bool = False) -> str:
    text = LOOP.replace("BEFORE", before).replace("AFTER", after).replace("(n, c", f"({trips}, c")
    if not collect:
        return text.replace("OUTPUT", "").replace("GIVEN", "")
    return (
        text.replace("OUTPUT", ", z")
        .replace("GIVEN", ", float[batch] u")
        .replace("w = Relu(v)", "w = Relu(v) u = Neg(v)")
    )


LOOPS = [
    Case("carried-shapes", loop("n"), loop("n", after="longer"), "[longer] of w"),
    Case("scan-length", loop("n2", collect=True), loop("n", collect=True), "as long as it runs"),
]

TYPES = [
    Case(
        "types",
        "(float[batch] x) => (float[batch] y) { y = Cos(x) }",
        "(int8[batch] x) => (int8[batch] y) { y = Neg(x) }",
        "INT8 of x",
    ),
    Case(
        "float64",
        "(float[batch] x) => (float[batch] y) { y = Add(x, w) }",
        "(double[batch] x) => (double[batch] y) { y = Add(x, w) }",
        "DOUBLE",
        {"w": ([1.0], FLOAT)},
        {"w": ([1.0], DOUBLE)},
    ),
    Case(
        "mixed-types",
        f"{HALVES} {{ y = RMSNormalization(x, w) }}",
        f"{HALVES} {{ y = RMSNormalization(x, w) }}",
        "FLOAT16 of x, FLOAT of w",
        {"w": ([1, 2, 3, 4], HALF)},
        {"w": ([1, 2, 3, 4], FLOAT)},
    ),
    Case(
        "int64-range",
        f"{FLOATS} {{ y = Trilu(x, n) }}",
        f"{FLOATS} {{ y = Trilu(x, n) }}",
        "4294967296",
        {"n": (1, INT64)},
        {"n": (2**32, INT64)},
    ),
]

QUANTIZED = [
    Case(
        "fp8-cast",
        QDQ,
        f"{HALVES} {{ q = Cast <to = 17> (x) y = DequantizeLinear(q, s) }}",
        "FLOAT16 to FLOAT8E4M3FN",
        SCALE,
    ),
    Case("fp8-format", QDQ, QDQ.replace("17", "19"), "FLOAT8E5M2", SCALE),
    Case(
        "fp8-route",
        QDQ.replace("y = Deq", "r = Transpose <perm = [0, 1]> (q) y = Deq").replace(
            "(q, s)", "(r, s)"
        ),
        QDQ.replace("y = Deq", "r = Concat <axis = 0> (q, q) y = Deq").replace("(q, s)", "(r, s)"),
        "Concat of fp8",
        SCALE,
    ),
    Case("scale-type", QDQ, QDQ, "FLOAT for FLOAT16", SCALE, {"s": (0.5, FLOAT)}),
    Case("scale-positive", QDQ, QDQ, "-0.5 in s", SCALE, {"s": (-0.5, HALF)}),
    Case(
        "scale-constant",
        QDQ,
        QDQ.replace("(x, s)", "(x, t)")
        .replace("{ q", "{ t = Abs(s) q")
        .replace("(q, s)", "(q, t)"),
        "t, which is computed",
        SCALE,
    ),
    Case(
        "scale-axis",
        QDQ,
        QDQ.replace("(x, s)", "<axis = 1> (x, t)").replace("17>", "17").replace("<axis", ", axis"),
        "4 scales for x",
        {**SCALE, "t": ([1, 2, 3, 4], HALF)},
    ),
    Case(
        "scale-shape",
        PRODUCT,
        PRODUCT,
        "got 4",
        {**SCALE, **WEIGHT, "t": ([1, 2], HALF)},
        {**SCALE, **WEIGHT, "t": ([1, 2, 3, 4], HALF)},
    ),
    Case(
        "block-size",
        BLOCKS,
        BLOCKS.replace("64", "32"),
        "blocks of 32 of INT4",
        {"w": ([[1, 2]] * 128, INT4), "t": ([[1, 2]] * 2, HALF)},
        {"w": ([[1, 2]] * 128, INT4), "t": ([[1, 2]] * 4, HALF)},
    ),
    Case(
        "scale-shape",
        BLOCKS,
        BLOCKS,
        "got scales [4, 2]",
        {"w": ([[1, 2]] * 128, INT4), "t": ([[1, 2]] * 2, HALF)},
        {"w": ([[1, 2]] * 128, INT4), "t": ([[1, 2]] * 4, HALF)},
    ),
    Case(
        "zero-point",
        QDQ.replace("(q, s)", "(q, s, z)"),
        QDQ.replace("(q, s)", "(q, s, z)"),
        "z, which is not zero",
        {**SCALE, "z": (0, E4M3)},
        {**SCALE, "z": (1, E4M3)},
    ),
    Case("quantized-type", QDQ.replace("17", "3"), QDQ.replace("17", "2"), "UINT8 of q", SCALE),
    Case(
        "folded-weight",
        PRODUCT,
        PRODUCT.replace("(a, b)", "(a, f)"),
        "a weight of FLOAT16",
        {**SCALE, **WEIGHT, "t": ([1, 2], HALF), "f": ([[1.0, 2.0]] * 4, HALF)},
    ),
]
CASES = [*OPERATORS, *LOOPS, *TYPES, *QUANTIZED]
