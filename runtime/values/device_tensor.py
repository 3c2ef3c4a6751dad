"""GPU tensors as inputs: passed by address, without a copy through the host.

torch is imported when there is such a tensor, and not before.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np

from enginecast.errors import InputError, MissingError
from enginecast.installation import install_command
from enginecast.runtime.values.arrays import Array

_CUDA = (2, 13)  # kDLCUDA and kDLCUDAManaged of dlpack.h
_ALIGNED = 16
"""Bytes; what kernels read at once."""


@dataclass(frozen=True)
class DeviceTensor:
    """A tensor of torch, seen by its address.  On the CPU it may be fed as such, too.

    It speaks DLPack itself, for sessions that need no address.
    """

    tensor: Any

    @property
    def pointer(self) -> int:
        return int(self.tensor.data_ptr())

    @property
    def dtype(self) -> str:
        """As the manifest calls it: "bfloat16"."""
        return str(self.tensor.dtype).removeprefix("torch.")

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    @property
    def device(self) -> str:
        """ "cpu" or "cuda"."""
        return str(self.tensor.device.type)

    @property
    def index(self) -> int:
        """Which of the machine's GPUs."""
        return self.tensor.device.index or 0

    @property
    def strides(self) -> tuple[int, ...]:
        """In bytes."""
        size = self.tensor.element_size()
        return tuple(stride * size for stride in self.tensor.stride())

    def __dlpack__(self, **options: Any) -> Any:
        return self.tensor.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.tensor.__dlpack_device__()

    def is_within(self, least: float | None, greatest: float | None) -> bool:
        """Whether all values are finite and between the ends, computed on the device."""
        import torch

        if self.tensor.numel() == 0 or self.tensor.dtype == torch.bool:
            return True
        found = torch.stack(list(torch.aminmax(self.tensor))).tolist()  # a NaN is both
        if not all(math.isfinite(value) for value in found):
            return False
        return (least is None or found[0] >= least) and (greatest is None or found[1] <= greatest)

    def aligned(self, to: int = _ALIGNED) -> "DeviceTensor":
        """Itself, or where a slice begins at an odd address, a copy on the same device."""
        return self if self.pointer % to == 0 else DeviceTensor(self.tensor.clone())

    def wait(self) -> None:
        """Until the device has computed the values, as far as torch's current stream knows."""
        import torch

        if self.device == "cuda":
            torch.cuda.current_stream(self.tensor.device).synchronize()

    def require_on(self, name: str, device: str, index: int) -> None:
        """Refuse a tensor that the engine would have to fetch from another device."""
        if (self.device, self.index) != (device, index):
            here = f"{device}:{index}" if device == "cuda" else device
            raise InputError(
                f"input {name!r}: expected a tensor on {here}, where the engine runs, got one on"
                f" {self.tensor.device}",
                hint=f"Move it yourself: .to({here!r}).",
            )


Feed = Array | DeviceTensor
"""What a session gets, checked."""


def shown_shapes(feeds: Mapping[str, Feed]) -> str:
    """The inputs of a run in a message: "input_ids [8, 512], attention_mask [8, 512]"."""
    return ", ".join(f"{name} {list(feed.shape)}" for name, feed in feeds.items())


def lies_on_gpu(value: Any) -> bool:
    """Whether it says by DLPack that it is in the memory of a CUDA GPU."""
    if isinstance(value, np.ndarray):
        return False
    ask = getattr(value, "__dlpack_device__", None)
    if ask is None:
        return False
    try:
        return int(ask()[0]) in _CUDA
    except (TypeError, ValueError, BufferError, RuntimeError):
        return False  # who reads it will say what is wrong


def view(value: Any) -> DeviceTensor:
    """A tensor of any library, uncopied; torch's current stream waits for its owner.

    Raises:
        MissingError: torch is not installed, or sees no GPU.
        BufferError: the owner does not hand it out (a torch tensor that requires grad).
    """
    if isinstance(value, DeviceTensor):
        return value
    if not can_view():
        raise MissingError(
            "a tensor on a GPU needs torch, which is not installed",
            hint=f"{install_command('export')}, or pass arrays in CPU memory.",
        )
    import torch
    from torch.utils.dlpack import from_dlpack

    if not torch.cuda.is_available():
        raise MissingError(
            "a tensor on a GPU, and this torch sees no CUDA GPU", hint="See `enginecast doctor`."
        )
    return DeviceTensor(from_dlpack(value))


def can_view() -> bool:
    """Whether torch is installed."""
    return find_spec("torch") is not None
