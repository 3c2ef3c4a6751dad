"""Putting entries into other shards: the new ones are committed first, then the old ones go.

A process that is killed in between leaves entries twice, and loses none.
"""

import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from enginecast.cache.store.disk import disk_error, disk_errors, try_lock
from enginecast.cache.store.folders import Encodings
from enginecast.cache.store.mapping import FileId, file_id
from enginecast.cache.store.shard import Entry, Shard, shard_name
from enginecast.errors import CacheError
from enginecast.runtime.values.arrays import Array

SHARD_BYTES = 256_000_000
"""Size of a shard, about."""
_INDEX_BYTES = 16 + 4 * 8
"""Of an entry besides its outputs, ids and text: key, sum, three offsets."""


def remove_file(path: Path, meant: FileId) -> int:
    """Remove a file, unless its name stands for another one by now; return the bytes freed."""
    try:
        status = path.stat()
        if file_id(status) != meant:
            return 0
        path.unlink()
    except FileNotFoundError:
        return 0
    except OSError as error:
        raise disk_error(path, error) from error
    return status.st_size


@contextmanager
def only_keeper(encodings: Encodings) -> Iterator[None]:
    """Keep other commands that move shards away from an encoder; writers go on.

    The lock goes with the process, however it ends.
    """
    with disk_errors(encodings.shard_folder):
        encodings.shard_folder.mkdir(exist_ok=True)  # copies of caches may lack empty folders
        descriptor = os.open(encodings.shard_folder, os.O_RDONLY)
    try:
        if try_lock(descriptor) is False:
            raise CacheError(
                f"{encodings.folder}: another verify, prune or merge is running on it",
                hint="Wait until it has ended.",
            )
        yield
    finally:
        os.close(descriptor)


def entries_of(parts: Iterable[tuple[Shard, Array]]) -> Iterator[Entry]:
    """The entries of shards that have these numbers."""
    for shard, numbers in parts:
        yield from (shard.entry(int(number)) for number in numbers)


def size_of(entry: Entry) -> int:
    """Bytes that an entry takes in a shard."""
    outputs = sum(values.nbytes for values in entry.outputs.values())
    return outputs + len(entry.ids) * 4 + len(entry.text.encode()) + _INDEX_BYTES


def commit_all(
    encodings: Encodings,
    entries: Iterable[Entry],
    *,
    shard_bytes: int = SHARD_BYTES,
    occupied: Collection[str] = (),
) -> list[Path]:
    """Commit entries, as many shards as they need.

    Args:
        entries: no key twice.
        occupied: names that a new shard must not take while it can be helped: there lie files
            whose entries are among these.
    """
    made: list[Path] = []
    for chunk in chunked(entries, shard_bytes):
        name = shard_name([entry.key for entry in chunk])
        half = len(chunk) // 2
        parts = [chunk[:half], chunk[half:]] if name in occupied and half else [chunk]
        made += [encodings.commit(part) for part in parts]
    return made


def chunked(entries: Iterable[Entry], shard_bytes: int) -> Iterator[Sequence[Entry]]:
    """Cut entries into runs of at most so many bytes, but at least one entry."""
    chunk: list[Entry] = []
    total = 0
    for entry in entries:
        size = size_of(entry)
        if chunk and total + size > shard_bytes:
            yield chunk
            chunk, total = [], 0
        chunk.append(entry)
        total += size
    if chunk:
        yield chunk
