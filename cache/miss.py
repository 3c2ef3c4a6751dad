"""A text that was asked for and is not in a cache, and what is there instead."""

import itertools
from collections.abc import Iterator
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from tokenizers import Tokenizer

from enginecast.cache.asking import Asked
from enginecast.cache.spec import EncoderSpec
from enginecast.cache.tokenizing import parse_tokenizer
from enginecast.runtime.arrays import Array

if TYPE_CHECKING:
    from enginecast.cache.reader import EmbeddingCache

_SAMPLES = 16
"""Cached texts that show whether a tokenizer reads what it writes."""


class Miss:
    """A text that was asked for, and what there is instead."""

    def __init__(self, cache: "EmbeddingCache", asked: Asked) -> None:
        self.cache = cache
        self.spec = cache.spec
        self.asked = asked
        self.core = bare(self.spec, asked.tokens)
        """Its ids without padding, masked or not."""

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return parse_tokenizer(self.cache.encodings.tokenizer_file.read_bytes())

    @cached_property
    def added(self) -> Array:
        """Ids that the tokenizer adds to each text."""
        self.tokenizer.no_padding()
        return np.array(self.tokenizer.encode("").ids, np.int64)

    @cached_property
    def added_behind(self) -> int:
        """How many of them come behind the text."""
        return (
            sum(int(one) == int(self.core[-1]) for one in self.added[-1:]) if len(self.core) else 0
        )

    @cached_property
    def padding(self) -> int:
        """How many of its ids are padding; the end token may be the same id."""
        end = self.spec.padding_id in self.added
        return max(0, len(self.asked.tokens) - len(self.core) - end)

    @cached_property
    def text(self) -> str:
        if self.asked.text is not None:
            return self.asked.text
        return self._read(self.core)

    @cached_property
    def words(self) -> Array:
        """Its ids without those that the tokenizer adds."""
        return self.core[~np.isin(self.core, self.added)]

    def entries(self) -> Iterator[tuple[str, Array]]:
        """Text and ids without padding of each entry."""
        for number in range(len(self.cache)):
            place = self.cache.index.row(number)
            yield self.cache.text_at(place), bare(self.spec, self.cache.ids_at(place))

    def holds_text(self, text: str) -> bool:
        """Whether the cache has a text, which goes into its template."""
        tokens = self.cache.tokenizing.tokens([text])[0]
        return self.cache.place_of(Asked(tokens.ids.astype(np.int64))) is not None

    def comes_back(self) -> bool:
        """Whether the tokenizer makes the same ids of the text that it reads from them.

        Not all tokenizers read what they write: true where this one fails on cached texts, too.
        """
        known = [ids for _, ids in itertools.islice(self.entries(), _SAMPLES)]
        return self._comes_back(self.core) or not all(map(self._comes_back, known))

    def _comes_back(self, ids: Array) -> bool:
        self.tokenizer.no_padding()
        self.tokenizer.no_truncation()
        made = np.array(self.tokenizer.encode(self._read(ids)).ids, np.int64)
        return np.array_equal(bare(self.spec, made), ids)

    def _read(self, ids: Array) -> str:
        words = ids[~np.isin(ids, self.added)]
        return str(self.tokenizer.decode(words[words >= 0].tolist()))


def bare(spec: EncoderSpec, ids: Array) -> Array:
    """Ids without the run of padding at their end.  Where the end token pads, without that, too."""
    kept = np.flatnonzero(ids != spec.padding_id)
    if not len(kept):
        return ids[:0]
    return ids[: kept[-1] + 1] if spec.padding_side == "right" else ids[kept[0] :]


def shortened(text: str) -> str:
    """A text in quotes, cut where it is long."""
    return repr(text if len(text) <= 80 else f"{text[:77]}...")
