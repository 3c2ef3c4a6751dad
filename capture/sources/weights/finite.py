"""Refuse infinite and NaN weights: an engine made from them agrees with nothing, and the error
should name the tensor, not a row of an output.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from enginecast.errors import SourceError

# Of each float of the safetensors format: the integer of its size, and the bits of its exponent,
# which are all set in what is not finite; more bits than these are set in what is NaN.
_LAYOUTS: Mapping[str, tuple[str, int]] = {
    "F64": ("<u8", 0x7FF << 52),
    "F32": ("<u4", 0xFF << 23),
    "F16": ("<u2", 0x1F << 10),
    "BF16": ("<u2", 0xFF << 7),
}
HINT = "Copy or download the checkpoint again, or train it in another precision."


@dataclass(frozen=True)
class Lost:
    """Elements of a tensor that are not finite numbers."""

    nan: int = 0
    infinite: int = 0

    def __bool__(self) -> bool:
        return bool(self.nan or self.infinite)

    def __add__(self, other: "Lost") -> "Lost":
        return Lost(self.nan + other.nan, self.infinite + other.infinite)

    def __str__(self) -> str:
        counts = ((self.nan, "NaN"), (self.infinite, "infinite"))
        return " and ".join(f"{count} {what}" for count, what in counts if count)


def lost_in(data: bytes, dtype: str) -> Lost:
    """Count the non-finite values in bytes of a safetensors dtype; integers have none."""
    if dtype not in _LAYOUTS:
        return Lost()
    integer, exponent = _LAYOUTS[dtype]
    bits = np.frombuffer(data, dtype=integer)
    if not ((bits & bits.dtype.type(exponent)) == exponent).any():
        return Lost()
    sizes = bits & bits.dtype.type(np.iinfo(bits.dtype).max >> 1)
    return Lost(int((sizes > exponent).sum()), int((sizes == exponent).sum()))


def require_finite(lost: Lost, what: str, *, is_buffer: bool = False) -> None:
    """Refuse a weight that has elements that are not numbers.

    A buffer may be a mask, and that of -inf.

    Raises:
        SourceError: names the tensor, and says how many elements of which kind.
    """
    if lost.nan or (lost.infinite and not is_buffer):
        raise SourceError(f"{what} has non-finite elements: {lost}", hint=HINT)


def require_finite_module(module: nn.Module, name: str) -> None:
    """Refuse a module with a weight that is not finite; see `require_finite`."""
    buffers = {key for key, _ in module.named_buffers()}
    for key, tensor in module.state_dict().items():
        require_finite(lost_of(tensor), f"{name}: {key}", is_buffer=key in buffers)


def lost_of(tensor: Tensor) -> Lost:
    """Count the non-finite values in a tensor."""
    if not tensor.is_floating_point() or tensor.is_meta:
        return Lost()
    if tensor.dtype.itemsize == 1:  # torch has no such functions for fp8
        tensor = tensor.float()
    if bool(torch.isfinite(tensor).all()):
        return Lost()
    return Lost(int(tensor.isnan().sum()), int(tensor.isinf().sum()))
