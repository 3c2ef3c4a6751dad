"""The entries of a cache as arrays that are sorted by key: 24 bytes each."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from enginecast.runtime.arrays import Array


@dataclass(frozen=True)
class Entries:
    """Keys, and where they are.

    Args:
        high: uint64, first half of each key as a big-endian number.
        low: uint64, second half.
        shard: int32, number of the shard.
        text: int32, number of the text within it.
    """

    high: Array
    low: Array
    shard: Array
    text: Array

    def __len__(self) -> int:
        return len(self.high)

    def at(self, chosen: Array) -> "Entries":
        """Those that are chosen, by number or by mask."""
        return Entries(*(array[chosen] for array in self.arrays()))

    def arrays(self) -> tuple[Array, ...]:
        return self.high, self.low, self.shard, self.text


def halves(keys: Array) -> tuple[Array, Array]:
    """Both halves of keys [n, 16], of uint8: uint64 [n] each."""
    pairs = np.ascontiguousarray(keys).view(">u8").astype(np.uint64)
    return pairs[:, 0].copy(), pairs[:, 1].copy()


def entries_of(keys: Array, shard: int) -> Entries:
    """The entries of a shard with these keys, in its own order."""
    number = np.full(len(keys), shard, np.int32)
    return Entries(*halves(keys), number, np.arange(len(keys), dtype=np.int32))


def renumbered(entries: Entries, numbers: Array) -> Entries:
    """The entries of those shards that are still there, under their new numbers.

    Args:
        numbers: int32, new number of each shard, or -1.
    """
    if not len(entries):
        return entries
    shard = numbers[entries.shard]
    moved = Entries(entries.high, entries.low, shard, entries.text)
    return moved if (shard >= 0).all() else moved.at(shard >= 0)


def joined(parts: Sequence[Entries]) -> Entries:
    """All entries, sorted by key; those of one key by shard and text.

    The parts may be in any order.  A long one that is sorted already costs next to nothing: the
    sort finds its runs.
    """
    if not parts:
        empty = np.empty(0, np.uint64)
        return Entries(empty, empty, empty.astype(np.int32), empty.astype(np.int32))
    columns = zip(*(part.arrays() for part in parts), strict=True)
    together = Entries(*(np.concatenate(column) for column in columns))
    ordered = together.at(np.argsort(together.high, kind="stable"))
    _order_ties(ordered)
    return ordered


def _order_ties(entries: Entries) -> None:
    """Sort, in place, the few entries whose high halves are equal."""
    same = entries.high[1:] == entries.high[:-1]
    if not same.any():
        return
    tied = np.zeros(len(entries), bool)
    tied[1:] |= same
    tied[:-1] |= same
    places = np.flatnonzero(tied)
    few = entries.at(places)
    order = np.lexsort((few.text, few.shard, few.low, few.high))
    for array in entries.arrays():
        array[places] = array[places][order]
