"""Whether ONNX Runtime's products of uint8 and int8 are exact on this CPU.

x86 without VNNI adds pairs of them in 16 bits, where they saturate, and a wrong result looks like
any other (microsoft/onnxruntime#12088).  What a CPU has is not asked of its name but of a product.
"""

from functools import cache

import numpy as np
import onnxruntime

_PRODUCT = bytes.fromhex(
    "080712003a5c0a180a01610a0162120179220d4d61744d756c496e74656765721201675a130a0161120e0a0c0802"
    "12080a0208100a0208405a130a0162120e0a0c080312080a0208400a02081062130a0179120e0a0c080612080a02"
    "08100a02081042040a00100a"
)
"""A model: y = MatMulInteger(a, b) of uint8 [16, 64] and int8 [64, 16].  As bytes, since the onnx
package is not needed to run an engine."""


@cache
def products_saturate() -> bool:
    """Whether the largest values that there are come out wrong."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(_PRODUCT, options, providers=["CPUExecutionProvider"])
    left, right = np.full((16, 64), 255, np.uint8), np.full((64, 16), 127, np.int8)
    found = np.asarray(session.run(None, {"a": left, "b": right})[0])
    return bool((found != 255 * 127 * 64).any())
