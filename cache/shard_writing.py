"""Writing a shard; see `shard` for what is in it."""

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import safetensors.numpy

from enginecast.cache.keys import KEY_BYTES
from enginecast.cache.shard_format import (
    FORMAT,
    SUFFIX,
    VERSION,
    described,
    index_digest,
    sum_of,
    tensor_name,
)
from enginecast.cache.spec import EncoderSpec, OutputSpec, fingerprint
from enginecast.runtime.arrays import Array


@dataclass(frozen=True)
class Entry:
    """The outputs of one text.

    Args:
        key: see `keys.Keys`.
        text: one that has these ids, cleaned and put into the template by whoever tokenized it.
        ids: int32 [tokens], without padding.
        outputs: [rows, width] by name for an output per token, [width] for one per text.
    """

    key: bytes
    text: str
    ids: Array
    outputs: Mapping[str, Array]


def shard_name(keys: Sequence[bytes]) -> str:
    """The file name of a shard with these keys."""
    return hashlib.blake2b(b"".join(sorted(keys)), digest_size=16).hexdigest() + SUFFIX


def write_shard(path: Path, spec: EncoderSpec, entries: Sequence[Entry]) -> None:
    """Write entries to a file and flush it; the caller gives it its final name.

    Args:
        entries: at least one, no key twice, each with the spec's outputs in its dtypes.

    Raises:
        OSError: the disk failed.
    """
    index = _index_of(spec, entries)
    outputs = {tensor_name(one): _joined(one, entries) for one in spec.outputs}
    tensors = {**index, **outputs}
    metadata = {
        "format": FORMAT,
        "version": str(VERSION),
        "spec": fingerprint(spec),
        "digest": index_digest(index, {name: described(array) for name, array in tensors.items()}),
    }
    safetensors.numpy.save_file(tensors, path, metadata)
    path.chmod(0o644)  # safetensors writes 0600, which no other user could read
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def _index_of(spec: EncoderSpec, entries: Sequence[Entry]) -> dict[str, Array]:
    texts = [entry.text.encode() for entry in entries]
    keys = b"".join(entry.key for entry in entries)
    rows = [_rows(spec, entry) for entry in entries]
    return {
        "keys": np.frombuffer(keys, np.uint8).reshape(len(entries), KEY_BYTES),
        "offsets": _offsets(rows),
        "ids": np.concatenate([np.asarray(entry.ids, np.int32) for entry in entries]),
        "id_offsets": _offsets([len(entry.ids) for entry in entries]),
        "texts": np.frombuffer(b"".join(texts), np.uint8),
        "text_offsets": _offsets([len(text) for text in texts]),
        "sums": np.array([sum_of(spec, entry.outputs) for entry in entries], np.uint64),
    }


def _rows(spec: EncoderSpec, entry: Entry) -> int:
    """Rows of a text; those outputs that have rows have equally many."""
    return next((len(entry.outputs[one.name]) for one in spec.outputs if one.per == "token"), 0)


def _joined(output: OutputSpec, entries: Sequence[Entry]) -> Array:
    join = np.concatenate if output.per == "token" else np.stack
    joined: Array = join([entry.outputs[output.name] for entry in entries])
    assert joined.dtype.name == output.dtype, (output, joined.dtype)
    return joined


def _offsets(sizes: Sequence[int]) -> Array:
    return np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)]).astype(np.int64)
