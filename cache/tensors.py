"""Stored arrays as torch tensors: numpy has no bfloat16 of its own that torch would take."""

import numpy as np
import torch
from torch import Tensor

from enginecast.runtime.arrays import BFLOAT16, Array

_DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def dtype_of(name: str) -> torch.dtype:
    """The torch dtype of an output's dtype in a spec."""
    return _DTYPES[name]


def to_tensor(array: Array) -> Tensor:
    """A tensor over the memory of an array that may be written to."""
    if array.dtype == BFLOAT16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)
