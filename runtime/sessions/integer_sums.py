"""Whether the integer products of an engine are right on this CPU.

x86 without VNNI adds two products of uint8 and int8 in 16 bits, where they saturate, and a wrong
result looks like any other (microsoft/onnxruntime#12088).  Two whose weights are 128 together fit.
So an engine says what its sums need:

    {"int8_sums": "16 bits"}    any CPU has them
    {"int8_sums": "32 bits"}    only one whose products do not saturate

ONNX Runtime's own way out, `session.x64quantprecision`, multiplies uint8 by uint8.  It is not used:
it fails on a tensor that two nodes share ("Attempt to replace the existing tensor"), leaves out
weights that a loop reads from outside, and takes up to seven times as long.
"""

from collections.abc import Set
from functools import cache

import numpy as np
import onnxruntime

from enginecast.runtime.bundle.manifest import EngineRecord
from enginecast.runtime.sessions.session import PROVIDERS

SUMS, ANY_CPU, EXACT = "int8_sums", "16 bits", "32 bits"
"""The key in `EngineRecord.requires`, and its values."""
LARGEST = 128
"""Sum of two weights up to which their products fit: 255 * 128 < 2^15."""
MULTIPLY = {
    "QLinearConv": (3,),
    "MatMulInteger": (1,),
    "MatMulIntegerToFloat": (1,),
    "DynamicQuantizeMatMul": (1,),
    "DynamicQuantizeLSTM": (1, 2),
}
"""ONNX operators that multiply unsigned activations, and which of their inputs are weights."""

_CPU = PROVIDERS["cpu"][0]
_PRODUCT = bytes.fromhex(
    "080712003a5c0a180a01610a0162120179220d4d61744d756c496e74656765721201675a130a0161120e0a0c0802"
    "12080a0208100a0208405a130a0162120e0a0c080312080a0208400a02081062130a0179120e0a0c080612080a02"
    "08100a02081042040a00100a"
)
"""A model: y = MatMulInteger(a, b) of uint8 [16, 64] and int8 [64, 16].  As bytes, since the onnx
package is not needed to run an engine."""


def products_saturate() -> bool:
    """Whether ONNX Runtime's sums of uint8 by int8 products saturate on this CPU.

    What a CPU has is not asked of its name but of a product of the largest values that there are.
    All operators of `MULTIPLY` share one kernel, chosen once for each process: under an emulated
    Haswell all of them saturate, whatever the sizes (but depthwise convolutions, which never do).
    """
    return not _is_exact(127, 127)


@cache
def _is_exact(*weights: int) -> bool:
    """Whether a product is exact, in which these weights take turns along K."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(_PRODUCT, options, providers=["CPUExecutionProvider"])
    left = np.full((16, 64), 255, np.uint8)
    right = np.tile(np.array(weights, np.int8)[:, None], (32, 16))
    found = np.asarray(session.run(None, {"a": left, "b": right})[0])
    return bool((found == 255 * 32 * sum(weights)).all())


def misfit(record: EngineRecord, operators: Set[str] | None = None, provider: str = "") -> str:
    """Why this CPU would compute an engine wrong; empty: it does not.

    Args:
        operators: those of the file; None: not known.  A bundle from before `int8_sums` was written
            counts as one that needs exact sums if they multiply.
        provider: what is to run it; empty: what it was made for.
    """
    if record.quantized != "int8":
        return ""
    made_for = record.providers[0] if record.providers else _CPU
    if _CPU not in (made_for, provider) and SUMS not in record.requires:
        return ""  # a GPU multiplies signed values
    if operators is not None and MULTIPLY.keys().isdisjoint(operators):
        return ""
    # Sums of which neighbors along K are 128 together may saturate where other two are added.
    fits = record.requires.get(SUMS) == ANY_CPU
    if _is_exact(127, 1) if fits else not products_saturate():
        return ""
    return (
        "this CPU adds int8 products in 16 bits, where they saturate (x86 without VNNI), and the"
        " engine needs 32"
    )
