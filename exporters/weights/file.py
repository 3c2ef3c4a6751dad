"""Write tensors into one safetensors file, each as soon as it is computed.

`safetensors.torch.save_file` wants every tensor in memory at once; the format does not: the header
needs names, dtypes and shapes only.  Source: https://github.com/huggingface/safetensors#format
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

import torch

from enginecast.errors import LoweringError
from enginecast.passes.ir.deferred_weights import LazyWeight

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_CHUNK = 64 << 20
WEIGHTS_FILE = "weights.safetensors"


def check_dtypes(weights: Iterable[LazyWeight]) -> None:
    """Refuse what the file cannot hold.

    Raises:
        LoweringError: names the weight and its dtype.
    """
    for weight in weights:
        if weight.dtype not in _NAMES:
            raise LoweringError(
                f"the weight {weight.name} is {str(weight.dtype).removeprefix('torch.')}, expected"
                " a float, an integer or bool",
                hint="Store a complex weight as its real and imaginary parts.",
            )


def write_weights(path: Path, weights: Iterable[LazyWeight]) -> dict[str, tuple[int, int]]:
    """Write the weights, largest element size first (so that every tensor is aligned), then by
    name.

    Args:
        weights: computed one at a time, and freed before the next.

    Returns:
        By name where each weight lies: bytes from the start of the file, and their number.

    Raises:
        LoweringError: a dtype that the format lacks, or a weight that came out in another shape or
            dtype than it was planned in.
    """
    weights = list(weights)
    check_dtypes(weights)
    ordered = sorted(weights, key=lambda w: (-w.dtype.itemsize, w.name))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    position = 0
    for weight in ordered:
        header[weight.name] = {
            "dtype": _NAMES[weight.dtype],
            "shape": list(weight.shape),
            "data_offsets": [position, position + weight.size],
        }
        position += weight.size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    placed: dict[str, tuple[int, int]] = {}
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for weight in ordered:
            placed[weight.name] = (file.tell(), weight.size)
            _write_one(file, weight)
    return placed


def _write_one(file: BinaryIO, weight: LazyWeight) -> None:
    """In a function of its own, so that nothing holds the tensor when the next one is computed."""
    tensor = weight.compute()
    if tuple(tensor.shape) != weight.shape or tensor.dtype != weight.dtype:
        raise LoweringError(
            f"the weight {weight.name} was planned as {weight.dtype} {list(weight.shape)}"
            f" and computed as {tensor.dtype} {list(tensor.shape)}",
            hint="A pass gave a node the wrong shape or dtype: export with fewer passes.",
        )
    flat = tensor.contiguous().reshape(-1).view(torch.uint8)
    for start in range(0, flat.numel(), _CHUNK):
        file.write(flat[start : start + _CHUNK].numpy().data)
