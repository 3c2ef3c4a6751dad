"""Read safetensors files: tensors as numpy arrays, or only the header.

bfloat16 is included, which safetensors.numpy 0.8 writes and cannot read.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import safetensors
import safetensors.numpy

from enginecast.errors import BundleError, InputError
from enginecast.runtime.bundle.staging import write_file
from enginecast.runtime.values.arrays import BFLOAT16, Array

MAX_HEADER = 100 << 20
"""What the safetensors format allows."""
_UNREADABLE: tuple[type[Exception], ...] = (
    *(ArithmeticError, AttributeError, KeyError, OSError),
    *(RecursionError, TypeError, ValueError),
)
"""What reading a header that is none may raise."""
_DTYPES = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "I16": np.dtype(np.int16),
    "I32": np.dtype(np.int32),
    "I64": np.dtype(np.int64),
    "F16": np.dtype(np.float16),
    "BF16": BFLOAT16,
    "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64),
}


def read_tensors(path: str | os.PathLike[str]) -> dict[str, Array]:
    """Read all tensors of a safetensors file; an InputError: none, or an unknown dtype."""
    try:
        data = Path(path).read_bytes()
        entries = safetensors.deserialize(data)  # type: ignore[no-untyped-call]  # it has no stubs
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from error
    except safetensors.SafetensorError as error:
        raise InputError(f"{path}: expected a safetensors file: {error}") from error
    arrays = {}
    for name, entry in entries:
        dtype = _DTYPES.get(entry["dtype"])
        if dtype is None:
            raise InputError(
                f"{path}: {name!r}: expected one of {', '.join(_DTYPES)}, got {entry['dtype']}"
            )
        arrays[name] = np.frombuffer(entry["data"], dtype).reshape(entry["shape"])
    return arrays


def write_tensors(path: str | os.PathLike[str], tensors: Mapping[str, Array]) -> None:
    """Write tensors as one safetensors file, mode 0644: whole, or not at all."""
    # safetensors 0.8 takes a strided array for a dense one and writes other values, silently
    contiguous = {name: np.asarray(array, order="C") for name, array in tensors.items()}
    write_file(path, safetensors.numpy.save(contiguous))


class StoredDtype(msgspec.Struct, frozen=True):
    """Weights of one dtype."""

    dtype: str
    """As safetensors names it: "F16"."""
    tensors: int
    bytes: int


def stored_dtypes(file: Path) -> tuple[StoredDtype, ...]:
    """Count the tensors of a safetensors file by dtype, the most bytes first."""
    found: dict[str, tuple[int, int]] = {}
    try:
        with file.open("rb") as stream:
            size = int.from_bytes(stream.read(8), "little")
            header: dict[str, Any] = json.loads(stream.read(size) if size <= MAX_HEADER else b"")
        header.pop("__metadata__", None)
        for entry in header.values():
            tensors, total = found.get(str(entry["dtype"]), (0, 0))
            begin, end, *_ = map(int, entry["data_offsets"])
            found[str(entry["dtype"])] = tensors + 1, total + end - begin
    except _UNREADABLE as error:
        raise BundleError(f"{file.name} cannot be read as safetensors: {error}") from error
    stored = [StoredDtype(dtype, *sums) for dtype, sums in found.items()]
    return tuple(sorted(stored, key=lambda each: -each.bytes))
