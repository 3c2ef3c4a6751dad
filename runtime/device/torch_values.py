"""Convert arrays to torch tensors, and back.

torch is imported when one is made, and not before.
"""

from typing import Any

import numpy as np

from enginecast.runtime.values.arrays import BFLOAT16, Array
from enginecast.runtime.values.device_tensor import DeviceTensor, Feed


def to_tensor(name: str, feed: Feed, device: str) -> Any:
    """A copy on a device: the model may write into its inputs."""
    import torch

    if isinstance(feed, DeviceTensor):
        feed.require_on(name, device, torch.cuda.current_device() if device == "cuda" else 0)
        return feed.tensor.clone()
    return as_tensor(feed.copy()).to(device)


def as_tensor(array: Array) -> Any:
    """A tensor that shares the array's memory; a copy of an array that may not be written."""
    import torch

    if not array.flags.writeable:
        array = array.copy()  # torch has no such tensors, and warns
    if array.dtype == BFLOAT16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def from_any(value: Any, *, is_bool: bool = False) -> Any:
    """A tensor that shares the memory of an array, or of what has `__dlpack__`.

    Args:
        is_bool: whether it holds booleans, which ONNX Runtime hands out as uint8.
    """
    import torch
    from torch.utils.dlpack import from_dlpack

    if isinstance(value, np.ndarray):
        return as_tensor(value)
    tensor = from_dlpack(value)
    return tensor.view(torch.bool) if is_bool else tensor


def to_host(value: Any) -> Array:
    """A tensor as an array in CPU memory."""
    import torch

    tensor = value.detach().cpu().contiguous()
    if tensor.dtype != torch.bfloat16:
        return np.asarray(tensor.numpy())
    return np.asarray(tensor.view(torch.int16).numpy().view(BFLOAT16))
