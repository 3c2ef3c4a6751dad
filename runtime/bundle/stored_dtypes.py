"""What dtypes an engine's weights are stored in, from the header of their file alone."""

import json
from pathlib import Path
from typing import Any

import msgspec

from enginecast.errors import BundleError

MAX_HEADER = 100 << 20
"""What the safetensors format allows."""


class StoredDtype(msgspec.Struct, frozen=True):
    """Weights of one dtype."""

    dtype: str
    """As safetensors names it: "F16"."""
    tensors: int
    bytes: int


def stored_dtypes(file: Path) -> tuple[StoredDtype, ...]:
    """Count the tensors of a safetensors file by dtype, the most bytes first.

    Raises:
        BundleError: the file is no safetensors.
    """
    found: dict[str, tuple[int, int]] = {}
    for dtype, size in _tensors(file):
        tensors, total = found.get(dtype, (0, 0))
        found[dtype] = tensors + 1, total + size
    stored = [StoredDtype(dtype, *sums) for dtype, sums in found.items()]
    return tuple(sorted(stored, key=lambda each: -each.bytes))


def _tensors(file: Path) -> list[tuple[str, int]]:
    try:
        with file.open("rb") as stream:
            size = int.from_bytes(stream.read(8), "little")
            header: dict[str, Any] = json.loads(stream.read(size) if size <= MAX_HEADER else b"")
        header.pop("__metadata__", None)
        return [
            (str(entry["dtype"]), int(entry["data_offsets"][1]) - int(entry["data_offsets"][0]))
            for entry in header.values()
        ]
    except (AttributeError, KeyError, TypeError, ValueError, OSError) as error:
        raise BundleError(f"{file.name} cannot be read as safetensors: {error}") from error
