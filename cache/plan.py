"""What a fill has to do: texts become keys, and those that the cache lacks become chunks.

Chunks are cut from all texts that are wanted, and not from those that are missing: a fill that goes
on where another was stopped, and a second writer with the same texts, cut the same ones and know
them by the same names.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import overload

import numpy as np

from enginecast.cache.index import Index
from enginecast.cache.keys import Keys
from enginecast.cache.request import TooLong
from enginecast.cache.shard_size import shard_size
from enginecast.cache.shard_writing import shard_name
from enginecast.cache.spec import EncoderSpec
from enginecast.cache.store import Encodings
from enginecast.cache.tokenized_texts import (
    EMPTY,
    Located,
    TokenizedTexts,
    Tokenizer,
    tokenize_all,
    unique_texts,
)
from enginecast.cache.work import Chunk, Truncation, Wanted
from enginecast.errors import InputError
from enginecast.runtime.arrays import Array

_SHOWN = 3
"""Texts that are too long to name in an error."""


@dataclass(frozen=True)
class FillPlan:
    """The work of a fill, and how much it is.

    Args:
        texts: given.
        unique: of these and the empty text, those with different token ids.
        cached: of the unique ones, those that the cache holds.
        tokens: of the texts to encode, without padding.
        shortest, median, longest: tokens of the unique texts.
        output_bytes: of the texts to encode.
        bytes: exact size of the shards to write, if each chunk becomes one.
        cut: texts that were too long, in the order given; each is cut to the longest.
        chunks: what is to be encoded; made when it is asked for, since a million texts are heavy.
    """

    texts: int
    unique: int
    cached: int
    tokens: int
    shortest: int
    median: float
    longest: int
    output_bytes: int
    bytes: int
    cut: tuple[Truncation, ...]
    chunks: "Chunks"

    @property
    def to_do(self) -> int:
        """Texts to encode."""
        return self.unique - self.cached


def plan_fill(
    encodings: Encodings,
    tokens: Tokenizer,
    texts: Located,
    index: Index,
    shard_bytes: int,
    *,
    too_long: TooLong = "error",
    least_chunks: int = 1,
) -> FillPlan:
    """Look at every text and cut those that are missing into chunks.

    Args:
        encodings: what to fill; only its spec is looked at, so it need not be on disk.
        texts: in any order, equal ones too.
        index: of what is there.
        shard_bytes: about how large a shard's outputs may be; at least one text goes into each.
        least_chunks: make shards smaller where there would be fewer of them, for as many workers.
        too_long: "error" refuses texts with more tokens than `max_length`; "truncate" cuts them.

    Returns:
        Chunks from the longest texts to the shortest, so that what does not fit in memory shows
        at once; texts of one length in the order of their keys.

    Raises:
        InputError: texts are too long: how many, where the first stand.
    """
    spec = encodings.spec
    read = tokenize_all(Keys(spec), tokens, texts)
    cut = [int(number) for number in np.flatnonzero(read.lengths > spec.max_length)]
    if cut and too_long == "error":
        raise _too_long([_place(texts, read, number) for number in cut[:_SHOWN]], len(cut), spec)
    order = unique_texts(read)
    keys = [read.key(number) for number in order]
    missing = index.find_all(keys) < 0
    sizes = read.sizes[order]
    outputs = _by_length(spec, sizes)
    bounds = _bounds(outputs, min(shard_bytes, int(outputs.sum()) // least_chunks))
    chunks = Chunks(texts, read, order, missing, bounds)
    return FillPlan(
        texts=len(texts),
        unique=len(order),
        cached=len(order) - int(missing.sum()),
        tokens=int(sizes[missing].sum()),
        shortest=int(sizes.min()),
        median=float(np.median(sizes)),
        longest=int(sizes.max()),
        output_bytes=int(outputs[missing].sum()),
        bytes=sum(chunks.sizes(spec)),
        cut=tuple(_cut(texts, read, number) for number in cut),
        chunks=chunks,
    )


class Chunks(Sequence[Chunk]):
    """The chunks of a plan that lack something.  Made by `plan_fill`."""

    def __init__(
        self,
        texts: Located,
        read: TokenizedTexts,
        order: Array,
        missing: Array,
        bounds: Sequence[int],
    ) -> None:
        self._texts = texts
        self._read = read
        self._order = order
        self._missing = missing
        self._all = order[missing]
        self._ranges = [(begin, end) for begin, end in pairwise(bounds) if missing[begin:end].any()]

    def __len__(self) -> int:
        return len(self._ranges)

    @overload
    def __getitem__(self, index: int) -> Chunk: ...

    @overload
    def __getitem__(self, index: slice) -> list[Chunk]: ...

    def __getitem__(self, index: int | slice) -> Chunk | list[Chunk]:
        if isinstance(index, slice):
            return [self[one] for one in range(*index.indices(len(self)))]
        wanted = tuple(self._wanted(int(number)) for number in self._lacking(index))
        return Chunk(self.name(index), wanted)

    def name(self, index: int) -> str:
        """What a chunk is called: a hash of all its keys, whether they are there or not."""
        begin, end = self._ranges[index]
        return shard_name([self._read.key(number) for number in self._order[begin:end]])

    def sample(self, begin: int, count: int) -> list[Wanted]:
        """Some of all texts to encode, in the order of the chunks."""
        return [self._wanted(int(number)) for number in self._all[begin : begin + count]]

    def sizes(self, spec: EncoderSpec) -> list[int]:
        """Bytes of the shards that they make."""
        return [self._size(spec, self._lacking(index)) for index in range(len(self))]

    def _size(self, spec: EncoderSpec, numbers: Array) -> int:
        return shard_size(
            spec, self._read.sizes[numbers].tolist(), int(self._read.text_bytes[numbers].sum())
        )

    def _lacking(self, index: int) -> Array:
        begin, end = self._ranges[index]
        return self._order[begin:end][self._missing[begin:end]]

    def _wanted(self, number: int) -> Wanted:
        return Wanted(self._read.key(number), _text(self._texts, number), self._read.ids(number))


def _by_length(spec: EncoderSpec, sizes: Array) -> Array:
    """Bytes of each text's outputs: int64 [texts]."""
    lengths, which = np.unique(sizes, return_inverse=True)
    return np.array([spec.bytes_for(int(length)) for length in lengths])[which]


def _bounds(sizes: Array, most: int) -> list[int]:
    """Where to cut so that no part is larger than `most`, unless it is one text alone."""
    ends = np.cumsum(sizes)
    bounds = [0]
    while bounds[-1] < len(sizes):
        begin = bounds[-1]
        before = int(ends[begin - 1]) if begin else 0
        bounds.append(max(begin + 1, int(np.searchsorted(ends, before + most, side="right"))))
    return bounds


def _text(texts: Located, number: int) -> str:
    return EMPTY if number == len(texts) else texts[number]


def _cut(texts: Located, read: TokenizedTexts, number: int) -> Truncation:
    return Truncation(_text(texts, number), int(read.lengths[number]), read.key(number))


def _place(texts: Located, read: TokenizedTexts, number: int) -> str:
    where = "the empty text" if number == len(texts) else texts.where(number)
    return f"{where} ({read.lengths[number]} tokens)"


def _too_long(first: Sequence[str], count: int, spec: EncoderSpec) -> InputError:
    more = f"; and {count - len(first)} more" if count > len(first) else ""
    what = "text is" if count == 1 else "texts are"
    return InputError(
        f"{count} {what} longer than {spec.max_length} tokens: {'; '.join(first)}{more}",
        hint="Cut them with --too-long truncate, which lists them; or give a larger --max-length"
        " if the model takes it.",
    )
