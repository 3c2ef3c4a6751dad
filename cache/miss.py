"""A text that was asked for and is not in a cache, and what is there instead."""

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from tokenizers import Tokenizer

from enginecast.cache.asking import Asked
from enginecast.cache.index import Place
from enginecast.cache.spec import EncoderSpec
from enginecast.cache.store import read_tokenizer
from enginecast.cache.tokenizing import parse_tokenizer
from enginecast.runtime.arrays import Array

if TYPE_CHECKING:
    from enginecast.cache.reader import EmbeddingCache

LOOKED_AT = 10_000
"""Entries that a text is compared with; of more these, at equal distances: a second at most."""
_IDS = 2**32
"""Ids from here on overflow in the tokenizers' library."""
_SAMPLES = 16
"""Cached texts that show whether a tokenizer reads what it writes."""


@dataclass(frozen=True)
class Near:
    """An entry that a text is compared with.

    Args:
        ids: without padding.
    """

    place: Place
    ids: Array


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
        return parse_tokenizer(read_tokenizer(self.cache.encodings))

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

    @cached_property
    def near(self) -> list[Near]:
        """The entries that it is compared with: all, or `LOOKED_AT` of them."""
        count = len(self.cache)
        numbers = np.linspace(0, count - 1, min(count, LOOKED_AT)).astype(np.int64)
        shards, texts = self.cache.index.rows(numbers)
        places = map(Place, shards.tolist(), texts.tolist())
        return [Near(place, bare(self.spec, self.cache.ids_at(place))) for place in places]

    @property
    def among(self) -> str:
        """What to say of an entry that is the nearest, where only some were looked at."""
        few = len(self.near) < len(self.cache)
        return f"of {len(self.near)} that were looked at, " if few else ""

    def text_of(self, near: Near) -> str:
        return self.cache.text_at(near.place)

    def holding(self, ids: Array) -> Place | None:
        """The entry of ids without padding; `bare` may have taken an end for padding."""
        end = np.array([self.spec.padding_id])
        left = self.spec.padding_side == "left"
        longer = np.concatenate((end, ids) if left else (ids, end))
        found = (self.cache.place_of(Asked(one)) for one in (ids, longer))
        return next((place for place in found if place is not None), None)

    def token(self, number: int) -> str:
        """A token of the cache's tokenizer, in quotes."""
        known = 0 <= number < _IDS
        return repr(self.tokenizer.id_to_token(int(number))) if known else "no token"

    def holds_text(self, text: str) -> bool:
        """Whether the cache has a text, which goes into its template."""
        tokens = self.cache.tokenizing.tokens([text])[0]
        return self.cache.place_of(Asked(tokens.ids.astype(np.int64))) is not None

    def comes_back(self) -> bool:
        """Whether the tokenizer makes the same ids of the text that it reads from them.

        Not all tokenizers read what they write: true where this one fails on cached texts, too.
        """
        known = [near.ids for near in self.near[:_SAMPLES]]
        return self._comes_back(self.core) or not all(map(self._comes_back, known))

    def _comes_back(self, ids: Array) -> bool:
        self.tokenizer.no_padding()
        self.tokenizer.no_truncation()
        made = np.array(self.tokenizer.encode(self._read(ids)).ids, np.int64)
        return np.array_equal(bare(self.spec, made), ids)

    def _read(self, ids: Array) -> str:
        words = ids[~np.isin(ids, self.added)]
        return str(self.tokenizer.decode(words[(words >= 0) & (words < _IDS)].tolist()))


def bare(spec: EncoderSpec, ids: Array) -> Array:
    """Ids without the run of padding at their end.  Where the end token pads, without that, too."""
    kept = np.flatnonzero(ids != spec.padding_id)
    if not len(kept):
        return ids[:0]
    return ids[: kept[-1] + 1] if spec.padding_side == "right" else ids[kept[0] :]


def shortened(text: str) -> str:
    """A text in quotes, cut where it is long."""
    return repr(text if len(text) <= 80 else f"{text[:77]}...")
