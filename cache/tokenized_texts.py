"""All texts of a fill as token ids and keys, in a few arrays: a million of them fit in memory."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Protocol

import numpy as np

from enginecast.cache.keys import KEY_BYTES, Keys
from enginecast.runtime.arrays import Array

EMPTY = ""
"""Always wanted: captions are dropped for it, and it is the usual negative prompt."""


_AT_ONCE = 4096
"""Texts tokenized at once."""


class TokenIds(Protocol):
    """The ids of a text."""

    @property
    def ids(self) -> Array:
        """int32 [tokens], cut to the longest."""
        ...

    @property
    def length(self) -> int:
        """Tokens before it was cut."""
        ...


class Tokenizer(Protocol):
    """Makes ids of texts: `tokenizing.Tokenizing`."""

    def tokens(self, texts: Sequence[str]) -> Sequence[TokenIds]: ...


class Located(Protocol):
    """Texts that know where they were read: `texts.Texts`."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[str]: ...

    def __getitem__(self, index: int, /) -> str: ...

    def where(self, index: int, /) -> str: ...


@dataclass(frozen=True)
class TokenizedTexts:
    """All texts, tokenized; the last one is the empty text.

    Args:
        keys: of all texts, one after the other.
        all_ids: int32 [tokens of all texts]
        offsets: int64 [texts + 1], where each text's ids begin.
        lengths: int64 [texts], tokens before they were cut.
        text_bytes: int64 [texts], of UTF-8.
    """

    keys: bytes
    all_ids: Array
    offsets: Array
    lengths: Array
    text_bytes: Array

    @property
    def sizes(self) -> Array:
        """Tokens of each text: int64 [texts]."""
        return np.diff(self.offsets)

    def key(self, number: int) -> bytes:
        return self.keys[number * KEY_BYTES : (number + 1) * KEY_BYTES]

    def ids(self, number: int) -> Array:
        begin, end = self.offsets[number : number + 2]
        return self.all_ids[begin:end].copy()


def tokenize_all(keys: Keys, tokenizer: Tokenizer, texts: Located) -> TokenizedTexts:
    """Tokenize texts and the empty one.

    Args:
        keys: makes the keys of their ids.
    """
    all_keys, ids = bytearray(), [np.empty(0, np.int32)]
    sizes, lengths, text_bytes = [0], [], []
    for batch in _batches(chain(texts, [EMPTY]), _AT_ONCE):
        found = tokenizer.tokens(batch)
        all_keys += b"".join(keys.of_tokens(one.ids) for one in found)
        ids.append(np.concatenate([one.ids for one in found]))
        sizes += [len(one.ids) for one in found]
        lengths += [one.length for one in found]
        text_bytes += [len(text.encode()) for text in batch]
    return TokenizedTexts(
        bytes(all_keys),
        np.concatenate(ids),
        np.cumsum(sizes),
        np.array(lengths),
        np.array(text_bytes),
    )


def _batches(texts: Iterable[str], count: int) -> Iterator[list[str]]:
    left = iter(texts)
    while batch := list(islice(left, count)):
        yield batch


def unique_texts(read: TokenizedTexts) -> Array:
    """One text of each key, longest first, then by key.

    Of several with one key the longest: without a mask a text and the same one with padding written
    out are the same row, of which the longer keeps more.
    """
    halves = np.frombuffer(read.keys, ">u8").astype(np.uint64).reshape(-1, 2)
    number = np.arange(len(halves))
    order = np.lexsort((number, -read.sizes, halves[:, 1], halves[:, 0]))
    ordered = halves[order]
    first = np.ones(len(order), bool)
    first[1:] = (ordered[1:] != ordered[:-1]).any(axis=1)
    unique = order[first]
    return unique[np.argsort(-read.sizes[unique], kind="stable")]
