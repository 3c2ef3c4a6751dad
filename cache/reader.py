"""Reading an embedding cache: by number, by token ids, by text.  Without torch.

    cache = open_cache("CACHE", "text_encoder_2")
    entry = cache.by_text("a photo of a cat")
    entry.outputs["last_hidden_state"]   # [rows, width], a view of the file

What it sees is what was committed when it was opened, until `refresh`: a fill may go on meanwhile.
It may be handed to other processes by fork or by pickling, and used by several threads.
"""

import os
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np

from enginecast.cache.asking import Asked, asked_of, require_texts, token_ids
from enginecast.cache.index import Index, Place, open_index
from enginecast.cache.keys import Keys
from enginecast.cache.miss import shortened
from enginecast.cache.misses import explain
from enginecast.cache.shard_writing import Entry
from enginecast.cache.spec import About, EncoderSpec
from enginecast.cache.store import Encodings, open_store, read_tokenizer
from enginecast.cache.tokenizing import Tokenizing
from enginecast.errors import CacheError, CacheMissError, UsageError
from enginecast.runtime.arrays import Array

Check = Literal["first", "always", "never"]


class EmbeddingCache:
    """The entries of one encoder.  Made by `open_cache`."""

    def __init__(self, encodings: Encodings, *, check: Check) -> None:
        self.encodings = encodings
        self._check = check
        self._index = open_index(encodings)
        self._whole: dict[Path, Array] = {}

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
        if mask is None:
            return self.look_up([Asked(row)])[0]
        return self.look_up([asked_of(self.spec, row, np.asarray(mask))])[0]

    def by_text(self, text: str) -> Entry:
        """The entry of a text, which is cleaned, put into the template and tokenized.

        A text that is too long is cut, as a fill does that was told to truncate.

        Raises:
            UsageError: it is no text.
            CacheMissError: there is no such entry; says why.
            CacheError: its outputs are damaged.
        """
        return self._entries(self._find_texts(require_texts([text], "text")))[0]

    def look_up(self, asked: Sequence[Asked]) -> list[Entry]:
        """The entries of texts that are given by token ids.

        Raises:
            CacheMissError: of the first that is not there; says why.
            CacheError: outputs are damaged.
        """
        return self._entries([self._find(one) for one in asked])

    def get_many(self, asked: Sequence[int | bytes | str]) -> list[Entry]:
        """Entries by number, key or text, read in the order in which they lie in the shards.

        Raises:
            IndexError: there is no entry of a number.
            CacheMissError: there is none of a key or text; says why.
            CacheError: outputs are damaged.
        """
        found = iter(self._find_texts([one for one in asked if isinstance(one, str)]))
        return self._entries(
            [next(found) if isinstance(one, str) else self._place(one) for one in asked]
        )

    def keys_of(self, texts: Sequence[str]) -> list[bytes]:
        """The keys of the entries of texts.

        Raises:
            UsageError: one is no text.
            CacheMissError: of the first that is not there; says why.
        """
        return [self._key(place) for place in self._find_texts(require_texts(texts))]

    def missing(self, texts: Sequence[str]) -> list[str]:
        """Those of some texts that have no entry, in their order; to know why, ask for one.

        Raises:
            UsageError: one is no text.
        """
        asked = require_texts(texts)
        return [one.text or "" for one in self._asked(asked) if self.place_of(one) is None]

    def __contains__(self, text: object) -> bool:
        """Whether a text has an entry."""
        return not self.missing(require_texts([text], "text"))

    def key_at(self, number: int) -> bytes:
        """The key of the entry of a number."""
        return self._key(self._place(number))

    def texts(self) -> Iterator[str]:
        """A text of each entry, in the order of their numbers."""
        for number in range(len(self)):
            yield self.text_at(self._index.row(number))

    def refresh(self) -> int:
        """See what was committed since: entries that are new.  Numbers of entries may change."""
        before = len(self)
        self._index = open_index(self.encodings, self._index)
        return len(self) - before

    def _key(self, place: Place) -> bytes:
        return self._index.shards[place.shard].key(place.text)

    def _find_texts(self, texts: Sequence[str]) -> list[Place]:
        return [self._find(one) for one in self._asked(texts)]

    def _asked(self, texts: Sequence[str]) -> list[Asked]:
        tokens = self.tokenizing.tokens(texts) if texts else []
        return [
            Asked(one.ids.astype(np.int64), text=text)
            for text, one in zip(texts, tokens, strict=True)
        ]

    def _find(self, asked: Asked) -> Place:
        place = self.place_of(asked)
        if place is None:
            raise explain(self, asked)
        return place

    def place_of(self, asked: Asked) -> Place | None:
        """Where the entry of a text is; None: nowhere."""
        spec, tokens = self.spec, asked.tokens
        if len(tokens) > spec.max_length:
            return None
        if spec.padded and asked.sequence not in (None, spec.max_length):
            return None
        place = self._index.find(self.keys.of_tokens(tokens))
        if place is None or not spec.mask:
            return place
        # Padding that is attended to makes the same row as padding that is not.
        return place if np.array_equal(self.ids_at(place), tokens) else None

    def ids_at(self, place: Place) -> Array:
        """int32 [tokens] of an entry, without padding."""
        return self._index.shards[place.shard].ids(place.text)

    def text_at(self, place: Place) -> str:
        return self._index.shards[place.shard].text(place.text)

    def _place(self, asked: int | bytes) -> Place:
        if isinstance(asked, bytes):
            place = self._index.find(asked)
            if place is None:
                raise CacheMissError(
                    f"{self.path}: there is no entry of key {asked.hex()} among {len(self)}"
                )
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
        if self._check != "never":
            self._require_whole(place)
        return self._index.shards[place.shard].entry(place.text)

    def _require_whole(self, place: Place) -> None:
        shard = self._index.shards[place.shard]
        whole = self._whole.setdefault(shard.path, np.zeros(len(shard), bool))
        if whole[place.text] and self._check == "first":
            return
        if not shard.is_whole(place.text):
            raise CacheError(
                f"{shard.path}: damaged: the outputs of {shortened(shard.text(place.text))} differ "
                "from their sum",
                hint=f"`enginecast cache verify {self.path.parent}` takes the shard out; then "
                "`cache fill` fills it again.",
            )
        whole[place.text] = True

    @cached_property
    def keys(self) -> Keys:
        return Keys(self.spec)

    @cached_property
    def tokenizing(self) -> Tokenizing:
        """Makes the token ids of texts, with the cache's own tokenizer.

        Raises:
            CacheError: tokenizer.json is missing, damaged, or another than the spec's.
        """
        return Tokenizing(read_tokenizer(self.encodings), self.spec)

    def __getstate__(self) -> dict[str, Any]:
        """What another process gets: the snapshot, without what this one found whole."""
        left = ("keys", "tokenizing")  # made again where they are needed
        kept = {name: value for name, value in vars(self).items() if name not in left}
        return {**kept, "_whole": {}}


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
