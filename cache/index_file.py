"""The index on disk: `index.safetensors`, derived from the shards, so that they need not be read.

    high, low   u64 [entries]    halves of the keys, sorted
    shard, text i32 [entries]
    listing     u8 [bytes]       JSON: the shards, each with size and time of change
    metadata: format, version, spec, digest

Whatever does not fit (damaged, of another spec, of shards that are not there) is made again.
"""

import os
from collections.abc import Sequence
from contextlib import suppress

import msgspec
import numpy as np
import safetensors.numpy
import xxhash
from safetensors import SafetensorError

from enginecast.cache.index_entries import Entries
from enginecast.cache.locks import own_folder
from enginecast.cache.mapping import FileBytes
from enginecast.cache.shard_format import DTYPES, SUFFIX, VERSION, read_header
from enginecast.cache.spec import fingerprint
from enginecast.cache.store import Encodings
from enginecast.runtime.arrays import Array
from enginecast.runtime.manifest import Record

FILE_NAME = "index.safetensors"
FORMAT = "enginecast-cache-index"
_SCANS = 10
"""How often a folder is read at most that others write to."""
_ENTRIES = ("high", "low", "shard", "text")


class Stamp(Record, frozen=True):
    """What tells a file from another of its name without reading it."""

    name: str
    size: int
    changed: int
    """Time of the last change in nanoseconds."""


class Listed(Record, frozen=True):
    """A shard that was indexed."""

    stamp: Stamp
    texts: int
    keys_sum: int
    """See `shard.sum_of_keys`."""


def list_shards(encodings: Encodings) -> list[Stamp]:
    """The shards committed by now, in the order of their names.

    Twice the same, since a folder may change while it is read: of shards that are joined then,
    neither the old ones nor the new one might be seen.

    Raises:
        OSError: the folder cannot be read.
    """
    before, stamps = None, _scan(encodings)
    for _ in range(_SCANS):
        if stamps == before:
            break
        before, stamps = stamps, _scan(encodings)
    return stamps


def _scan(encodings: Encodings) -> list[Stamp]:
    stamps = []
    try:
        with os.scandir(encodings.shard_folder) as found:
            for file in found:
                if not file.name.endswith(SUFFIX):
                    continue
                with suppress(FileNotFoundError):  # somebody took it out meanwhile
                    status = file.stat()
                    stamps.append(Stamp(file.name, status.st_size, status.st_mtime_ns))
    except FileNotFoundError:
        return []
    return sorted(stamps, key=lambda stamp: stamp.name)


def read_index(encodings: Encodings) -> tuple[list[Listed], Entries] | None:
    """What is indexed on disk: the arrays are mapped.  None: nothing of use."""
    try:
        content = FileBytes(encodings.folder / FILE_NAME)
        first = content.read(0, 8).tobytes()
        table, metadata, _ = read_header(first, lambda size: content.read(8, 8 + size).tobytes())
        arrays = {
            name: content.read(one.begin, one.end).view(DTYPES[one.dtype]).reshape(one.shape)
            for name, one in table.items()
        }
        entries = Entries(*(arrays[name] for name in _ENTRIES))
        if metadata != _metadata(encodings, entries, arrays["listing"]):
            return None
        listing = msgspec.json.decode(arrays["listing"].tobytes(), type=list[Listed])
    except (ArithmeticError, AttributeError, LookupError, OSError, TypeError, ValueError):
        return None
    return listing, entries


def write_index(encodings: Encodings, listing: Sequence[Listed], entries: Entries) -> bool:
    """Write the index, all of it or nothing.

    Returns:
        False where the disk does not allow it: what is derived need not be there.
    """
    encoded = np.frombuffer(msgspec.json.encode(list(listing)), np.uint8)
    tensors = dict(zip(_ENTRIES, entries.arrays(), strict=True)) | {"listing": encoded}
    try:
        with own_folder(encodings.staging_folder) as folder:
            made = folder / FILE_NAME
            safetensors.numpy.save_file(tensors, made, _metadata(encodings, entries, encoded))
            made.chmod(0o644)  # safetensors writes 0600
            made.replace(encodings.folder / FILE_NAME)
    except (OSError, SafetensorError):
        return False
    return True


def _metadata(encodings: Encodings, entries: Entries, listing: Array) -> dict[str, str]:
    digest = xxhash.xxh3_128()
    for array in (*entries.arrays(), listing):
        digest.update(f"{array.dtype.str}{array.shape}".encode())
        digest.update(np.ascontiguousarray(array).view(np.uint8).data)
    return {
        "format": FORMAT,
        "version": str(VERSION),
        "spec": fingerprint(encodings.spec),
        "digest": digest.hexdigest(),
    }
