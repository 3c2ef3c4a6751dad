"""A text that was asked for and is not in a cache, and what is there instead."""

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
    def text(self) -> str:
        if self.asked.text is not None:
            return self.asked.text
        return str(self.tokenizer.decode(self.words[self.words >= 0].tolist()))

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
        """Whether the tokenizer makes the same ids of the text that it reads from them."""
        self.tokenizer.no_padding()
        self.tokenizer.no_truncation()
        return bool(self.tokenizer.encode(self.text).ids == self.core.tolist())


def bare(spec: EncoderSpec, ids: Array) -> Array:
    """Ids without the run of padding at their end.  Where the end token pads, without that, too."""
    kept = np.flatnonzero(ids != spec.padding_id)
    if not len(kept):
        return ids[:0]
    return ids[: kept[-1] + 1] if spec.padding_side == "right" else ids[kept[0] :]


def shortened(text: str) -> str:
    """A text in quotes, cut where it is long."""
    return repr(text if len(text) <= 80 else f"{text[:77]}...")
