"""Pass numpy arrays to and from ONNX Runtime, bfloat16 included, without copies.

Numpy has no bfloat16 of its own: `numpy.from_dlpack` and `OrtValue.numpy` both refuse it (tried
with numpy 2.4 and onnxruntime 1.31), so such tensors go by address, as arrays of
`ml_dtypes.bfloat16`.
"""

import ctypes
import math
from typing import Any

import numpy as np  # before ml_dtypes, which prints a traceback of its own where numpy is broken

# isort: split
import ml_dtypes
import numpy.typing as npt
from onnxruntime import OrtValue

Array = npt.NDArray[Any]

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
ONNX_BFLOAT16 = 16  # TensorProto.DataType.BFLOAT16
_DLPACK_CPU = 1  # kDLCPU of dlpack.h


def to_array(value: Any) -> Array:
    """View a numpy array, or any CPU tensor that speaks DLPack, as a numpy array, uncopied.

    Raises:
        TypeError: not an array, or not in CPU memory.
        BufferError: its owner does not hand it out (a torch tensor that requires grad).
    """
    if isinstance(value, np.ndarray):
        return value
    if not (hasattr(value, "__dlpack__") and hasattr(value, "__dlpack_device__")):
        raise TypeError(f"a {type(value).__name__}, which is neither numpy nor DLPack")
    device = value.__dlpack_device__()
    if int(device[0]) != _DLPACK_CPU:
        raise TypeError(
            f"a tensor on DLPack device {int(device[0])}:{device[1]}, which is neither the CPU nor"
            " a CUDA GPU"
        )
    if isinstance(value, OrtValue):
        return from_ort(value)
    if str(getattr(value, "dtype", "")).endswith("bfloat16"):
        capsule = value.__dlpack__()
        try:
            return from_ort(OrtValue.from_dlpack(capsule))
        except RuntimeError as error:
            raise BufferError("a bfloat16 tensor that is not contiguous") from error
    return np.from_dlpack(value)


def is_finite(array: Array) -> bool:
    """Whether no element of a float array is NaN or infinite.

    A sum of fp32 or fp64 passes both on, takes one look at memory and no memory of its own; where
    it overflows itself, the elements are looked at.
    """
    if array.dtype.char in "fd":
        with np.errstate(all="ignore"):
            if math.isfinite(np.add.reduce(array, axis=None)):
                return True
    return bool(np.isfinite(array).all())


def to_ort(array: Array) -> OrtValue:
    """Hand a contiguous array to ONNX Runtime; the value keeps the array alive."""
    if array.dtype == BFLOAT16:
        return OrtValue.ortvalue_from_numpy_with_onnx_type(array.view(np.uint16), ONNX_BFLOAT16)
    return OrtValue.ortvalue_from_numpy(array)


def from_ort(value: OrtValue) -> Array:
    """View a tensor of ONNX Runtime that lies in CPU memory as an array."""
    if value.element_type() != ONNX_BFLOAT16:
        return np.asarray(value.numpy())
    size = value.tensor_size_in_bytes()
    if size == 0:
        return np.empty(value.shape(), BFLOAT16)
    memory = (ctypes.c_uint8 * size).from_address(value.data_ptr())
    memory.owner = value  # the array keeps `memory` alive, and so the tensor
    return np.frombuffer(memory, BFLOAT16).reshape(value.shape())
