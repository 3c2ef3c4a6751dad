"""Where each key is: derived from the shards, and a snapshot of them.

A fill that goes on meanwhile adds shards, and changes none; `Index` does not see what was committed
after it was made.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from enginecast.cache.shard import Shard, open_shard
from enginecast.cache.spec import EncoderSpec
from enginecast.errors import CacheError
from enginecast.runtime.arrays import Array


@dataclass(frozen=True)
class Place:
    """An entry: the number of its shard, and of the text in it."""

    shard: int
    text: int


class Index:
    """The entries of some shards, by key and by number; of a key that is there twice, one.

    Args:
        shards: in the order of their names: of entries with one key the first counts.
    """

    def __init__(self, shards: Sequence[Shard]) -> None:
        self.shards = tuple(shards)
        sizes = [len(shard) for shard in shards]
        halves = _halves([shard.keys for shard in shards])
        shard = np.repeat(np.arange(len(shards), dtype=np.int32), sizes)
        text = np.concatenate([np.arange(size, dtype=np.int32) for size in sizes] or [shard])
        order = np.lexsort((text, shard, halves[:, 1], halves[:, 0]))
        sorted_halves = halves[order]
        first = np.ones(len(order), bool)
        first[1:] = (sorted_halves[1:] != sorted_halves[:-1]).any(axis=1)
        kept = order[first]
        self._high, self._low = sorted_halves[first].T.copy()
        self._shard, self._text = shard[kept], text[kept]
        self._rows = np.lexsort((self._text, self._shard))
        """Row -> position: rows count in the order of the shards."""
        self.doubles = len(order) - len(kept)
        """Entries whose key is in an earlier shard, too."""

    def __len__(self) -> int:
        return len(self._high)

    def find(self, key: bytes) -> Place | None:
        """Where the entry of a key is; None: nowhere."""
        found = int(self.find_all([key])[0])
        return None if found < 0 else self._place(found)

    def find_all(self, keys: Sequence[bytes]) -> Array:
        """The positions of keys, -1 for those that are not there: int64 [keys]."""
        if not len(self) or not keys:
            return np.full(len(keys), -1, np.int64)
        halves = _halves([np.frombuffer(b"".join(keys), np.uint8).reshape(len(keys), -1)])
        at = np.searchsorted(self._high, halves[:, 0])
        result = np.full(len(keys), -1, np.int64)
        for index, (position, low) in enumerate(zip(at, halves[:, 1], strict=True)):
            high = halves[index, 0]
            while position < len(self) and self._high[position] == high:
                if self._low[position] == low:
                    result[index] = position
                    break
                position += 1
        return result

    def row(self, number: int) -> Place:
        """The entry of a number, from 0: the order is that of the shards' names."""
        return self._place(int(self._rows[number]))

    def _place(self, position: int) -> Place:
        return Place(int(self._shard[position]), int(self._text[position]))


def build_index(paths: Iterable[Path], spec: EncoderSpec) -> tuple[Index, list[CacheError]]:
    """Open shards and index them.

    Returns:
        The index of those that are whole, and what is wrong with the others.
    """
    shards, errors = [], []
    for path in paths:
        try:
            shards.append(open_shard(path, spec))
        except CacheError as error:
            errors.append(error)
    return Index(shards), errors


def _halves(keys: Sequence[Array]) -> Array:
    """Keys as pairs of big-endian numbers: uint64 [keys, 2]."""
    joined = np.concatenate([*keys, np.empty((0, 16), np.uint8)])
    return np.ascontiguousarray(joined).view(">u8").astype(np.uint64).reshape(-1, 2)
