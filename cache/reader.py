"""Reading an embedding cache: by number, by token ids, by text.  Without torch.

    cache = open_cache("CACHE", "text_encoder_2")
    entry = cache.by_text("a photo of a cat")
    entry.outputs["last_hidden_state"]   # [rows, width], a view of the file

What it sees is what was committed when it was opened, until `refresh`: a fill may go on meanwhile.
It may be handed to other processes by fork or by pickling, and used by several threads.
"""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from enginecast.cache.asking import token_ids, tokens_of
from enginecast.cache.index import Index, Place, build_index
from enginecast.cache.keys import Keys
from enginecast.cache.shard_writing import Entry
from enginecast.cache.spec import About, EncoderSpec
from enginecast.cache.store import Encodings, open_store
from enginecast.errors import CacheError, CacheMissError, UsageError
from enginecast.runtime.arrays import Array

Check = Literal["first", "always", "never"]
Asked = int | bytes
"""An entry: its number, or its key."""


class EmbeddingCache:
    """The entries of one encoder.  Made by `open_cache`."""

    def __init__(self, encodings: Encodings, *, check: Check) -> None:
        self.encodings = encodings
        self.keys = Keys(encodings.spec)
        self._check = check
        self._open()

    @property
    def path(self) -> Path:
        return self.encodings.folder

    @property
    def spec(self) -> EncoderSpec:
        return self.encodings.spec

    @property
    def about(self) -> About:
        return self.encodings.about

    @property
    def index(self) -> Index:
        return self._index

    def __len__(self) -> int:
        """Entries; each has other token ids."""
        return len(self._index)

    def by_row(self, number: int) -> Entry:
        """The entry of a number; 0 to `len` - 1, in the order of the shards.

        Raises:
            IndexError: there is no such entry.
            CacheError: its outputs are damaged.
        """
        return self.get_many([number])[0]

    def by_ids(
        self, ids: Sequence[int] | Array, mask: Sequence[int] | Array | None = None
    ) -> Entry:
        """The entry of a row of token ids.

        Args:
            ids: [sequence], a row as the model gets it, or the bare ids of a text.
            mask: [sequence], not zero for tokens; None: every id is one.

        Raises:
            CacheMissError: there is no such entry; says why.
            CacheError: its outputs are damaged, or the mask does not fit the spec.
        """
        row = token_ids(ids)
        tokens = tokens_of(self.spec, row, None if mask is None else np.asarray(mask))
        return self.by_tokens([tokens])[0]

    def by_tokens(self, asked: Sequence[Array]) -> list[Entry]:
        """The entries of texts, each given as int64 [tokens], or padded where the spec has no mask.

        Raises:
            CacheMissError: of the first that is not there; says why.
            CacheError: outputs are damaged.
        """
        places = []
        for tokens in asked:
            place = self._find(tokens)
            if place is None:
                raise self._miss(tokens)
            places.append(place)
        return self._entries(places)

    def get_many(self, asked: Sequence[Asked]) -> list[Entry]:
        """Entries by number or key, read in the order in which they lie in the shards.

        Raises:
            IndexError: there is no entry of a number.
            CacheMissError: there is none of a key.
            CacheError: outputs are damaged.
        """
        return self._entries([self._place(one) for one in asked])

    def texts(self) -> Iterator[str]:
        """A text of each entry, in the order of their numbers."""
        for number in range(len(self)):
            place = self._index.row(number)
            yield self._index.shards[place.shard].text(place.text)

    def refresh(self) -> int:
        """See what was committed since: entries that are new.  Numbers of entries may change."""
        before = len(self)
        self._open()
        return len(self) - before

    def _open(self) -> None:
        self._index, self.damaged = build_index(self.encodings.shard_paths(), self.spec)
        self._whole: dict[Path, Array] = {}

    def _find(self, tokens: Array) -> Place | None:
        if len(tokens) > self.spec.max_length:
            return None
        place = self._index.find(self.keys.of_tokens(tokens))
        if place is None or not self.spec.mask:
            return place
        # Padding that is attended to makes the same row as padding that is not.
        found = self._index.shards[place.shard].ids(place.text)
        return place if np.array_equal(found, tokens) else None

    def _place(self, asked: Asked) -> Place:
        if isinstance(asked, bytes):
            place = self._index.find(asked)
            if place is None:
                raise CacheMissError(f"{self.path}: there is no entry of key {asked.hex()}")
            return place
        if not 0 <= asked < len(self):
            raise IndexError(f"{self.path}: expected an entry 0..{len(self) - 1}, got {asked}")
        return self._index.row(int(asked))

    def _entries(self, places: Sequence[Place]) -> list[Entry]:
        entries: list[Entry | None] = [None] * len(places)
        for number in sorted(range(len(places)), key=lambda one: _order(places[one])):
            entries[number] = self._entry(places[number])
        return [entry for entry in entries if entry is not None]

    def _entry(self, place: Place) -> Entry:
        shard = self._index.shards[place.shard]
        try:
            if self._check != "never":
                self._require_whole(place)
            return shard.entry(place.text)
        except OSError as error:
            raise CacheError(
                f"{shard.path}: {error.strerror or error}",
                hint="Shards that were pruned or joined meanwhile are found after `refresh()`.",
            ) from error

    def _require_whole(self, place: Place) -> None:
        shard = self._index.shards[place.shard]
        whole = self._whole.setdefault(shard.path, np.zeros(len(shard), bool))
        if whole[place.text] and self._check == "first":
            return
        if not shard.is_whole(place.text):
            raise CacheError(
                f"{shard.path}: damaged: the outputs of {_short(shard.text(place.text))} differ "
                "from their sum",
                hint=f"`enginecast cache verify {self.path.parent}` takes the shard out; then "
                "`cache fill` fills it again.",
            )
        whole[place.text] = True

    def _miss(self, tokens: Array) -> CacheMissError:
        return CacheMissError(f"{self.path}: no entry of {len(tokens)} tokens")

    def __getstate__(self) -> dict[str, Any]:
        """What another process gets: the snapshot, without what this one found whole."""
        return {**vars(self), "_whole": {}}


def open_cache(
    path: str | os.PathLike[str], name: str | None = None, *, check: Check = "first"
) -> EmbeddingCache:
    """Open a cache for reading.

    Args:
        path: of the cache.
        name: of the encoder; None: the only one.
        check: when outputs are compared with the sum that was stored with them: "first": when this
            process first reads them; "always": each time; "never".

    Raises:
        CacheError: there is no such cache or encoder, or it is damaged.
        UsageError: no such `check`.
    """
    if check not in ("first", "always", "never"):
        raise UsageError(f"check: expected first, always or never, got {check!r}")
    return EmbeddingCache(open_store(path).encodings(name), check=check)


def _order(place: Place) -> tuple[int, int]:
    return place.shard, place.text


def _short(text: str) -> str:
    return repr(text if len(text) <= 80 else f"{text[:77]}...")
