"""Where each key is: derived from the shards, and a snapshot of them.

A fill that goes on meanwhile adds shards, and changes none; `Index` does not see what was committed
after it was made.  `index.safetensors` keeps the entries, so that shards need not be read:

    keys        u8 [entries, 16] sorted
    shard, text i32 [entries]
    listing     u8 [bytes]       JSON: the shards, each with size and time of change
    metadata: format, version, spec, digest

Whatever does not fit (damaged, of another spec, of shards that are gone) is made again.
"""

import os
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

import msgspec
import numpy as np
import safetensors.numpy
import xxhash
from safetensors import SafetensorError

from enginecast.cache.store.disk import disk_error, own_folder
from enginecast.cache.store.folders import Encodings
from enginecast.cache.store.mapping import FileBytes
from enginecast.cache.store.shard import (
    SUFFIX,
    Entry,
    Shard,
    metadata_of,
    open_shard,
    read_table,
    read_tensor,
)
from enginecast.cache.store.spec import KEY_BYTES
from enginecast.errors import CacheError
from enginecast.runtime.bundle.manifest import Record
from enginecast.runtime.values.arrays import Array

FILE_NAME = "index.safetensors"
FORMAT = "enginecast-cache-index"
_LISTINGS = 10
"""How often a folder is listed at most that others write to."""
_FEW_SHARDS = 16
"""So many are read as quickly as an index of them."""


class Location(NamedTuple):
    """Where an entry is: the number of its shard, and of the text in it."""

    shard: int
    text: int


class Entries(NamedTuple):
    """Keys, and where they are: 24 bytes each."""

    keys: Array
    """S16, see `as_keys`."""
    shard: Array
    """int32, number of the shard."""
    text: Array
    """int32, number of the text within it."""

    def at(self, chosen: Array) -> "Entries":
        """Those that are chosen, by number or by mask."""
        return Entries(*(array[chosen] for array in self))


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


class Index:
    """The entries of some shards, by key and by number; of a key that is there twice, one.

    Made by `open_index` and `index_of`.  Of entries with one key the first counts, in the order of
    the shards.

    Args:
        shards: those that are whole.
        entries: of the shards, sorted.
        listing: of the shards, where they were listed.
        on_disk: how many entries the index on disk has of these.
        errors: what is wrong with other shards: their keys count as missing.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        entries: Entries,
        listing: Sequence[Listed] = (),
        on_disk: int = 0,
        errors: Sequence[CacheError] = (),
    ) -> None:
        self.shards = tuple(shards)
        self.entries = entries
        self.listing = tuple(listing)
        self.on_disk = on_disk
        self.errors = tuple(errors)
        self._begins = np.cumsum([0, *(len(shard) for shard in self.shards)])
        same = np.flatnonzero(_repeated(entries.keys)) + 1
        # Entries that do not count, as numbers in the order of the shards: int64, sorted.
        self._passed_over = np.sort(self._begins[entries.shard[same]] + entries.text[same])

    def __len__(self) -> int:
        return len(self.entries.keys) - self.doubles

    @property
    def doubles(self) -> int:
        """Entries whose key is in an earlier shard, too."""
        return len(self._passed_over)

    def require_whole(self) -> "Index":
        """The index itself; a CacheError where a shard cannot be read."""
        if self.errors:
            raise self.errors[0]
        return self

    def find(self, key: bytes) -> Location | None:
        """Where the entry of a key is; None: nowhere."""
        entries = self.entries
        at = int(entries.keys.searchsorted(np.bytes_(key)))
        if at < len(entries.keys) and entries.keys[at] == key.rstrip(b"\0"):  # as numpy gives it
            return Location(entries.shard.item(at), entries.text.item(at))
        return None

    def find_all(self, keys: Sequence[bytes] | Array) -> Array:
        """The positions of keys (or uint8 [keys, 16]): int64 [keys], -1 where there is none."""
        if not isinstance(keys, np.ndarray):
            keys = np.frombuffer(b"".join(keys), np.uint8)
        wanted, there = as_keys(keys), self.entries.keys
        order = np.argsort(wanted)  # neighbors are found three times as quickly
        at = np.empty(len(wanted), np.int64)
        at[order] = np.searchsorted(there, wanted[order])
        at[at == len(there)] = -1
        found = at >= 0
        found[found] = there[at[found]] == wanted[found]
        return np.where(found, at, -1)

    def locations(self, positions: Array) -> tuple[Array, Array]:
        """Shards and texts at positions that `find_all` gave: int32 [positions] each."""
        return self.entries.shard[positions], self.entries.text[positions]

    def row(self, number: int) -> Location:
        """The entry of a number, from 0: the order is that of the shards' names."""
        if not 0 <= number < len(self):
            raise IndexError(f"row {number} of {len(self)}")
        (shard,), (text,) = self.rows(np.array([number]))
        return Location(int(shard), int(text))

    def whole_entry(self, number: int) -> Entry:
        """The entry of a number, see `row`, unless its outputs are damaged: a CacheError."""
        shard, text = self.row(number)
        self.shards[shard].require_whole(text)
        return self.shards[shard].entry(text)

    def rows(self, numbers: Array) -> tuple[Array, Array]:
        """Shards and texts of the entries of numbers: int64 [numbers] each; see `row`."""
        before = self._passed_over - np.arange(self.doubles)
        entry = numbers + np.searchsorted(before, numbers, side="right")
        shards = np.searchsorted(self._begins, entry, side="right") - 1
        return shards, entry - self._begins[shards]


def open_index(encodings: Encodings, before: Index | None = None, *, keep: bool = True) -> Index:
    """Index what is committed by now, reading only the shards that are new.

    What was read is kept in `index.safetensors` for the next one, where that is worth it and the
    folder can be written.

    Args:
        before: an earlier index of these encodings: its shards stay as they are, mapped or not.
        keep: False writes nothing.

    Raises:
        CacheError: the folder of shards cannot be read.  What is wrong with single shards is in
            `errors`.
    """
    index = before
    if index is None:
        listing, entries = read_index(encodings) or ([], _joined([]))
        folder, spec = encodings.shard_folder, encodings.spec
        shards = [Shard(folder / o.stamp.name, spec, o.texts, o.keys_sum) for o in listing]
        index = Index(shards, entries, listing, len(entries.keys))
    for _ in range(_LISTINGS):
        try:
            stamps = list_shards(encodings)
        except OSError as error:
            raise disk_error(encodings.shard_folder, error) from error
        if not index.errors and stamps == [one.stamp for one in index.listing]:
            break
        index = _refreshed(encodings, index, stamps)
        # A shard that is gone before it is opened is not damage: its entries are in another one by
        # now, which the next listing has.
        if not any(isinstance(error.__cause__, FileNotFoundError) for error in index.errors):
            break
    # Only where much is missing on disk, so that many refreshes write little.
    count = len(index.entries.keys)
    worth = len(index.listing) > _FEW_SHARDS and (count - index.on_disk) * 8 > count
    if keep and worth:
        listed = np.frombuffer(msgspec.json.encode(index.listing), np.uint8)
        entries = index.entries
        keys = entries.keys.view(np.uint8).reshape(-1, KEY_BYTES)
        tensors = {"keys": keys, "shard": entries.shard, "text": entries.text, "listing": listed}
        # All of it or nothing: the folder may not be writable.
        with suppress(OSError, SafetensorError), own_folder(encodings.staging_folder) as folder:
            made = folder / FILE_NAME
            safetensors.numpy.save_file(tensors, made, _metadata(encodings, entries, listed))
            made.chmod(0o644)  # safetensors writes 0600
            made.replace(encodings.folder / FILE_NAME)
            index.on_disk = count
    return index


def index_of(shards: Sequence[Shard]) -> Index:
    """Index shards in this order: of entries with one key the first counts."""
    return Index(shards, _joined([_entries_of(shard.keys, n) for n, shard in enumerate(shards)]))


def _refreshed(encodings: Encodings, known: Index, stamps: Sequence[Stamp]) -> Index:
    """The index of the shards of a listing."""
    numbers = {one.stamp: number for number, one in enumerate(known.listing)}
    moved = np.full(len(known.listing), -1, np.int32)
    listing: list[Listed] = []
    shards: list[Shard] = []
    fresh, errors = [], []
    for stamp in stamps:
        number = numbers.get(stamp)
        if number is not None:
            moved[number] = len(shards)
            listing.append(known.listing[number])
            shards.append(known.shards[number])
            continue
        try:
            opened = open_shard(encodings.shard_folder / stamp.name, encodings.spec)
            fresh.append(_entries_of(opened.keys, len(shards)))
            listing.append(Listed(stamp, len(opened), opened.keys_sum))
            shards.append(opened.closed())
        except CacheError as error:
            errors.append(error)
    kept = known.entries
    if len(kept.keys):
        kept = kept._replace(shard=moved[kept.shard])
        kept = kept if (kept.shard >= 0).all() else kept.at(kept.shard >= 0)
    on_disk = known.on_disk - len(known.entries.keys) + len(kept.keys)
    return Index(shards, _joined([kept, *fresh]), listing, on_disk, errors)


def as_keys(keys: Array) -> Array:
    """Keys, uint8 [n, 16], as values that numpy compares and sorts: S16 [n]."""
    return np.ascontiguousarray(keys).view(f"S{KEY_BYTES}").reshape(-1)


def _repeated(keys: Array) -> Array:
    """Whether each key but the first is the one before: bool [n - 1]; numbers compare quickest."""
    first, second = keys.view(np.uint64).reshape(-1, 2).T
    return np.asarray((first[1:] == first[:-1]) & (second[1:] == second[:-1]))


def _entries_of(keys: Array, shard: int) -> Entries:
    """The entries of a shard with these keys, in its own order."""
    number = np.full(len(keys), shard, np.int32)
    return Entries(as_keys(keys), number, np.arange(len(keys), dtype=np.int32))


def _joined(parts: Sequence[Entries]) -> Entries:
    """All entries, sorted by key; those of one key by shard and text.

    The parts may be in any order.  A long one that is sorted already costs next to nothing: the
    sort finds its runs.
    """
    if not parts:
        none = np.empty(0, np.int32)
        return Entries(np.empty(0, f"S{KEY_BYTES}"), none, none)
    entries = Entries(*(np.concatenate(column) for column in zip(*parts, strict=True)))
    entries = entries.at(np.argsort(entries.keys, kind="stable"))
    same = np.flatnonzero(_repeated(entries.keys))
    if len(same):
        numbers = np.union1d(same, same + 1)
        tied = entries.at(numbers)
        order = np.lexsort((tied.text, tied.shard, tied.keys))
        for array in entries:
            array[numbers] = array[numbers][order]
    return entries


def list_shards(encodings: Encodings) -> list[Stamp]:
    """The shards committed by now, in the order of their names.

    Twice the same, since a folder may change while it is read: of shards that are joined then,
    neither the old ones nor the new one might be seen.
    """
    stamps: list[Stamp] = []
    for listing in range(1 + _LISTINGS):
        before, stamps = stamps, []
        with suppress(FileNotFoundError), os.scandir(encodings.shard_folder) as files:
            for file in files:
                with suppress(FileNotFoundError):  # somebody took it out meanwhile
                    if file.name.endswith(SUFFIX):
                        status = file.stat()
                        stamps.append(Stamp(file.name, status.st_size, status.st_mtime_ns))
        stamps.sort(key=lambda stamp: stamp.name)
        if listing and stamps == before:
            break
    return stamps


def read_index(encodings: Encodings) -> tuple[list[Listed], Entries] | None:
    """What is indexed on disk: the arrays are mapped.  None: nothing of use."""
    try:
        content = FileBytes(encodings.folder / FILE_NAME)
        table, metadata = read_table(content)
        arrays = {name: read_tensor(content, one) for name, one in table.items()}
        entries = Entries(as_keys(arrays["keys"]), arrays["shard"], arrays["text"])
        if metadata != _metadata(encodings, entries, arrays["listing"]):
            return None
        return msgspec.json.decode(arrays["listing"].tobytes(), type=list[Listed]), entries
    except (ArithmeticError, AttributeError, LookupError, OSError, TypeError, ValueError):
        return None


def _metadata(encodings: Encodings, entries: Entries, listing: Array) -> dict[str, str]:
    digest = xxhash.xxh3_128()
    for array in (*entries, listing):
        digest.update(f"{array.dtype.str}{array.shape}".encode())
        digest.update(np.ascontiguousarray(array).view(np.uint8).data)
    return metadata_of(FORMAT, encodings.spec, digest.hexdigest())
