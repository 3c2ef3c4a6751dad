"""Where each key is: derived from the shards, and a snapshot of them.

A fill that goes on meanwhile adds shards, and changes none; `Index` does not see what was committed
after it was made.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from enginecast.cache.disk import disk_error
from enginecast.cache.index_entries import Entries, entries_of, halves, joined, renumbered
from enginecast.cache.index_file import Listed, Stamp, list_shards, read_index, write_index
from enginecast.cache.keys import KEY_BYTES
from enginecast.cache.shard import Shard, open_shard
from enginecast.cache.spec import EncoderSpec
from enginecast.cache.store import Encodings
from enginecast.errors import CacheError
from enginecast.runtime.arrays import Array

_LISTINGS = 10
"""How often shards are listed at most when some are gone before they are opened."""
_FEW_SHARDS = 16
"""So many are read as quickly as an index of them."""


@dataclass(frozen=True)
class Place:
    """An entry: the number of its shard, and of the text in it."""

    shard: int
    text: int


@dataclass(frozen=True)
class Contents:
    """Shards that were listed, and their entries.

    Args:
        listing: in the order of the names.
        shards: of the listing.
        entries: of the shards, sorted.
        on_disk: how many entries the index on disk has of these.
    """

    listing: Sequence[Listed]
    shards: Sequence[Shard]
    entries: Entries
    on_disk: int


class Index:
    """The entries of some shards, by key and by number; of a key that is there twice, one.

    Made by `open_index`.  Of entries with one key the first counts, in the order of the names of
    their shards.

    Args:
        contents: of the shards that are whole.
        errors: what is wrong with others: their keys count as missing.
    """

    def __init__(self, contents: Contents, errors: Sequence[CacheError] = ()) -> None:
        self.contents = contents
        self.shards = tuple(contents.shards)
        self.errors = tuple(errors)
        self._entries = contents.entries
        self._begins = np.cumsum([0, *(len(shard) for shard in self.shards)])
        self._passed_over = self._find_doubles()

    def __len__(self) -> int:
        return len(self._entries) - self.doubles

    @property
    def doubles(self) -> int:
        """Entries whose key is in an earlier shard, too."""
        return len(self._passed_over)

    def find(self, key: bytes) -> Place | None:
        """Where the entry of a key is; None: nowhere."""
        high, low = int.from_bytes(key[:8], "big"), int.from_bytes(key[8:], "big")
        entries = self._entries
        position = int(entries.high.searchsorted(np.uint64(high)))
        while position < len(entries.high) and entries.high.item(position) == high:
            if entries.low.item(position) == low:
                return Place(entries.shard.item(position), entries.text.item(position))
            position += 1
        return None

    def find_all(self, keys: Sequence[bytes] | Array) -> Array:
        """The positions of keys, -1 for those that are not there: int64 [keys].

        Args:
            keys: or uint8 [keys, 16].
        """
        wanted = keys
        if not isinstance(wanted, np.ndarray):
            wanted = np.frombuffer(b"".join(keys), np.uint8).reshape(len(keys), KEY_BYTES)
        high, low = halves(wanted)
        at = np.searchsorted(self._entries.high, high)
        found = np.full(len(keys), -1, np.int64)
        left = np.arange(len(keys))
        while len(left):  # once, but for keys whose high halves are equal
            left = left[at[left] < len(self._entries)]
            left = left[self._entries.high[at[left]] == high[left]]
            same = self._entries.low[at[left]] == low[left]
            found[left[same]] = at[left[same]]
            left = left[~same]
            at[left] += 1
        return found

    def place(self, position: int) -> Place:
        """The entry at a position that `find_all` gave."""
        return Place(int(self._entries.shard[position]), int(self._entries.text[position]))

    def places(self, positions: Array) -> tuple[Array, Array]:
        """Shards and texts at positions that `find_all` gave: int32 [positions] each."""
        return self._entries.shard[positions], self._entries.text[positions]

    def row(self, number: int) -> Place:
        """The entry of a number, from 0: the order is that of the shards' names.

        Raises:
            IndexError: there are not so many.
        """
        if not 0 <= number < len(self):
            raise IndexError(f"row {number} of {len(self)}")
        shards, texts = self.rows(np.array([number]))
        return Place(int(shards[0]), int(texts[0]))

    def rows(self, numbers: Array) -> tuple[Array, Array]:
        """Shards and texts of the entries of numbers: int64 [numbers] each."""
        before = self._passed_over - np.arange(self.doubles)
        entry = numbers + np.searchsorted(before, numbers, side="right")
        shards = np.searchsorted(self._begins, entry, side="right") - 1
        return shards, entry - self._begins[shards]

    def _find_doubles(self) -> Array:
        """Entries that do not count, as numbers in the order of the shards, sorted: int64."""
        entries = self._entries
        same = np.flatnonzero(entries.high[1:] == entries.high[:-1])
        same = same[entries.low[same + 1] == entries.low[same]] + 1
        return np.sort(self._begins[entries.shard[same]] + entries.text[same])


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
    known = before.contents if before else _from_disk(encodings)
    contents, errors = _up_to_date(encodings, known)
    if before and contents is known and not before.errors:
        return before
    worth = keep and _worth_writing(contents)
    if worth and write_index(encodings, contents.listing, contents.entries):
        contents = replace(contents, on_disk=len(contents.entries))
    return Index(contents, errors)


def build_index(paths: Iterable[Path], spec: EncoderSpec) -> tuple[Index, list[CacheError]]:
    """Open shards and index them, without a look at the index on disk.

    Returns:
        The index of those that are whole, and what is wrong with the others.
    """
    shards, errors = [], []
    for path in paths:
        try:
            shards.append(open_shard(path, spec))
        except CacheError as error:
            errors.append(error)
    return index_of(shards, errors), errors


def index_of(shards: Sequence[Shard], errors: Sequence[CacheError] = ()) -> Index:
    """Index shards in this order: of entries with one key the first counts."""
    parts = [entries_of(shard.keys, number) for number, shard in enumerate(shards)]
    return Index(Contents((), shards, joined(parts), 0), errors)


def _from_disk(encodings: Encodings) -> Contents:
    listing, entries = read_index(encodings) or ([], joined([]))
    shards = [
        Shard(encodings.shard_folder / one.stamp.name, encodings.spec, one.texts, one.keys_sum)
        for one in listing
    ]
    return Contents(listing, shards, entries, len(entries))


def _up_to_date(encodings: Encodings, known: Contents) -> tuple[Contents, list[CacheError]]:
    """The contents of all that is there, and what is wrong with some of it.

    A shard that is gone before it is opened is no damage: its entries are in another one by now,
    which the next listing has.
    """
    errors: list[CacheError] = []
    for _ in range(_LISTINGS):
        stamps = _listed(encodings)
        if stamps == [one.stamp for one in known.listing]:
            return known, []
        known, errors = _refreshed(encodings, known, stamps)
        if not any(isinstance(error.__cause__, FileNotFoundError) for error in errors):
            break
    return known, errors


def _listed(encodings: Encodings) -> list[Stamp]:
    try:
        return list_shards(encodings)
    except OSError as error:
        raise disk_error(encodings.shard_folder, error) from error


def _refreshed(
    encodings: Encodings, known: Contents, stamps: Sequence[Stamp]
) -> tuple[Contents, list[CacheError]]:
    """The contents of the shards of a listing, and what is wrong with some of them."""
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
        except CacheError as error:
            errors.append(error)
            continue
        fresh.append(entries_of(opened.keys, len(shards)))
        listing.append(Listed(stamp, len(opened), opened.keys_sum))
        shards.append(opened.closed())
    kept = renumbered(known.entries, moved)
    on_disk = known.on_disk - len(known.entries) + len(kept)
    return Contents(listing, shards, joined([kept, *fresh]), on_disk), errors


def _worth_writing(contents: Contents) -> bool:
    """Whether much is missing on disk: a part of all, so that many refreshes write little."""
    missing = len(contents.entries) - contents.on_disk
    return len(contents.listing) > _FEW_SHARDS and missing * 8 > len(contents.entries)
