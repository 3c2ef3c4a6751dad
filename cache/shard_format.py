"""The safetensors files that shards are: names, table of tensors, digests.  See `shard`."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import xxhash

from enginecast.cache.spec import EncoderSpec, OutputSpec
from enginecast.runtime.arrays import BFLOAT16, Array
from enginecast.runtime.stored import MAX_HEADER

FORMAT = "enginecast-cache"
VERSION = 1
SUFFIX = ".safetensors"

DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "BF16": BFLOAT16,
    "F16": np.dtype(np.float16),
    "U64": np.dtype(np.uint64),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "U8": np.dtype(np.uint8),
}
INDEX = {
    "keys": "U8",
    "offsets": "I64",
    "ids": "I32",
    "id_offsets": "I64",
    "texts": "U8",
    "text_offsets": "I64",
    "sums": "U64",
}
"""The tensors besides the outputs, and their dtypes."""


@dataclass(frozen=True)
class Tensor:
    """Where a tensor lies in its file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def sum_of(spec: EncoderSpec, outputs: Mapping[str, Array]) -> int:
    """The xxh3 (64 bits) of the outputs of a text, in the spec's order."""
    digest = xxhash.xxh3_64()
    for one in spec.outputs:
        digest.update(np.ascontiguousarray(outputs[one.name]).view(np.uint8).data)
    return digest.intdigest()


def tensor_name(output: OutputSpec) -> str:
    """What a shard calls an output."""
    return f"{'rows' if output.per == 'token' else 'text'}.{output.name}"


def described(array: Array) -> list[Any]:
    """Dtype and shape of an array, as the digest takes them."""
    stored = next(name for name, dtype in DTYPES.items() if dtype == array.dtype)
    return [stored, list(array.shape)]


def index_digest(index: Mapping[str, Array], shapes: Mapping[str, list[Any]]) -> str:
    """Hash the table of tensors, and all of them but the outputs."""
    digest = xxhash.xxh3_128(json.dumps(shapes, sort_keys=True).encode())
    for name in INDEX:
        digest.update(np.ascontiguousarray(index[name]).view(np.uint8).data)
    return digest.hexdigest()


def read_header(
    first: bytes, read: Callable[[int], bytes]
) -> tuple[dict[str, Tensor], dict[str, str], int]:
    """The table of a safetensors file with places in the file, its metadata, and where data begin.

    Raises:
        ValueError: it is no safetensors file.
    """
    size = int.from_bytes(first, "little")
    if len(first) < 8 or size > MAX_HEADER:
        raise ValueError("no safetensors header")
    raw = json.loads(read(size))
    begin = 8 + size
    metadata = raw.pop("__metadata__", {})
    table = {
        name: Tensor(
            str(one["dtype"]),
            tuple(int(length) for length in one["shape"]),
            begin + int(one["data_offsets"][0]),
            begin + int(one["data_offsets"][1]),
        )
        for name, one in raw.items()
    }
    _require_gapless(table, begin)
    return table, metadata, begin


def _require_gapless(table: Mapping[str, Tensor], begin: int) -> None:
    """Each tensor has the size of its shape, and follows on the one before."""
    ends = [begin]
    for tensor in sorted(table.values(), key=lambda one: one.begin):
        size = int(np.prod(tensor.shape, dtype=np.int64)) * DTYPES[tensor.dtype].itemsize
        if tensor.end - tensor.begin != size or min(tensor.shape, default=0) < 0:
            raise ValueError("a tensor has another size than its shape")
        ends += [tensor.begin, tensor.end]
    if any(one != other for one, other in list(pairwise(ends))[::2]):
        raise ValueError("there are gaps between tensors")
