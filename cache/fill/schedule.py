"""What a fill has to do: texts become keys, and those that the cache lacks become chunks.

Chunks are cut from all texts that are wanted, and not from those that are missing: a fill that goes
on where another was stopped, and a second writer with the same texts, cut the same ones and know
them by the same names.  All texts are held in a few arrays: a million of them fit in memory.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice, pairwise

import numpy as np

from enginecast.cache.encoders.request import TooLong
from enginecast.cache.encoders.tokenizing import Tokenizing
from enginecast.cache.fill.texts import Texts
from enginecast.cache.store.index import Index
from enginecast.cache.store.records import Truncation
from enginecast.cache.store.shard import shard_name, shard_size
from enginecast.cache.store.spec import KEY_BYTES, EncoderSpec, Keys
from enginecast.errors import InputError
from enginecast.runtime.values.arrays import Array

EMPTY = ""
"""Always wanted: captions are dropped for it, and it is the usual negative prompt."""
_AT_ONCE = 4096
"""Texts tokenized at once."""
_SHOWN = 3
"""Texts that are too long to name in an error."""


@dataclass(frozen=True)
class Wanted:
    """A text whose outputs are wanted, with its key and its ids: int32 [tokens]."""

    key: bytes
    text: str
    ids: Array


@dataclass(frozen=True)
class Chunk:
    """Texts that make one shard: what a worker takes on, and what is done again when it dies.

    Args:
        name: the same for the same texts, whoever cuts them into chunks: what a worker claims.
        wanted: no key twice, longest first.
    """

    name: str
    wanted: tuple[Wanted, ...]


@dataclass(frozen=True)
class FillSchedule:
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


def schedule_fill(
    spec: EncoderSpec,
    tokenizing: Tokenizing,
    texts: Texts,
    index: Index,
    shard_bytes: int,
    *,
    too_long: TooLong = "error",
    least_chunks: int = 1,
) -> FillSchedule:
    """Look at every text and cut those that are missing into chunks.

    Args:
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
    read = _tokenize(spec, tokenizing, texts)
    cut = [int(number) for number in np.flatnonzero(read.lengths > spec.max_length)]
    if cut and too_long == "error":
        named = []
        for number in cut[:_SHOWN]:
            where = "the empty text" if number == len(texts) else texts.where(number)
            named.append(f"{where} ({read.lengths[number]} tokens)")
        if len(cut) > len(named):
            named.append(f"and {len(cut) - len(named)} more")
        what = "text is" if len(cut) == 1 else "texts are"
        raise InputError(
            f"{len(cut)} {what} longer than {spec.max_length} tokens: {'; '.join(named)}",
            hint="Cut them with --too-long truncate, which lists them; or give a larger"
            " --max-length if the model takes it.",
        )
    # One text of each key, longest first, then by key.  Of several with one key the longest:
    # without a mask a text and the same one with padding written out are the same row, of which
    # the longer keeps more.
    keys = np.frombuffer(read.keys, f"S{KEY_BYTES}")
    longest = np.argsort(-read.sizes, kind="stable")
    unique = longest[np.unique(keys[longest], return_index=True)[1]]
    order = unique[np.argsort(-read.sizes[unique], kind="stable")]
    missing = index.find_all([read.key(number) for number in order]) < 0
    sizes = read.sizes[order]
    lengths, which = np.unique(sizes, return_inverse=True)
    outputs = np.array([spec.bytes_for(int(length)) for length in lengths])[which]
    bounds = _bounds(outputs, min(shard_bytes, int(outputs.sum()) // least_chunks))
    chunks = Chunks(read, order, missing, bounds)
    return FillSchedule(
        texts=len(texts),
        unique=len(order),
        cached=len(order) - int(missing.sum()),
        tokens=int(sizes[missing].sum()),
        shortest=int(sizes.min()),
        median=float(np.median(sizes)),
        longest=int(sizes.max()),
        output_bytes=int(outputs[missing].sum()),
        bytes=chunks.bytes(spec),
        cut=tuple(
            Truncation(read.text(number), int(read.lengths[number]), read.key(number))
            for number in cut
        ),
        chunks=chunks,
    )


class Chunks:
    """The chunks of a schedule that lack something."""

    def __init__(
        self, read: "_Tokenized", order: Array, missing: Array, bounds: Sequence[int]
    ) -> None:
        self._read, self._order, self._missing = read, order, missing
        self._ranges = [(begin, end) for begin, end in pairwise(bounds) if missing[begin:end].any()]

    def __len__(self) -> int:
        return len(self._ranges)

    def __getitem__(self, index: int) -> Chunk:
        wanted = tuple(self._wanted(int(number)) for number in self._missing_of(index))
        return Chunk(self.name(index), wanted)

    def __iter__(self) -> Iterator[Chunk]:
        return (self[index] for index in range(len(self)))

    def name(self, index: int) -> str:
        """What a chunk is called: a hash of all its keys, whether they are there or not."""
        begin, end = self._ranges[index]
        return shard_name([self._read.key(number) for number in self._order[begin:end]])

    def sample(self, begin: int, count: int) -> list[Wanted]:
        """Some of all texts to encode, in the order of the chunks."""
        missing = self._order[self._missing]
        return [self._wanted(int(number)) for number in missing[begin : begin + count]]

    def bytes(self, spec: EncoderSpec) -> int:
        """Size of the shards that they make."""
        sizes, text_bytes = self._read.sizes, self._read.text_bytes
        return sum(
            shard_size(spec, sizes[numbers].tolist(), int(text_bytes[numbers].sum()))
            for numbers in map(self._missing_of, range(len(self)))
        )

    def _missing_of(self, index: int) -> Array:
        begin, end = self._ranges[index]
        return self._order[begin:end][self._missing[begin:end]]

    def _wanted(self, number: int) -> Wanted:
        return Wanted(self._read.key(number), self._read.text(number), self._read.ids(number))


@dataclass(frozen=True)
class _Tokenized:
    """All texts, tokenized; the last one is the empty text, which is not in `texts`."""

    texts: Texts
    keys: bytes
    """One after the other."""
    all_ids: Array
    """int32 [tokens of all texts]"""
    offsets: Array
    """int64 [texts + 1], where each text's ids begin."""
    lengths: Array
    """int64 [texts], tokens before they were cut."""
    text_bytes: Array
    """int64 [texts], of UTF-8."""

    @property
    def sizes(self) -> Array:
        """Tokens of each text: int64 [texts]."""
        return np.diff(self.offsets)

    def text(self, number: int) -> str:
        return EMPTY if number == len(self.texts) else self.texts[number]

    def key(self, number: int) -> bytes:
        return self.keys[number * KEY_BYTES : (number + 1) * KEY_BYTES]

    def ids(self, number: int) -> Array:
        begin, end = self.offsets[number : number + 2]
        return self.all_ids[begin:end].copy()


def _tokenize(spec: EncoderSpec, tokenizing: Tokenizing, texts: Texts) -> _Tokenized:
    """Tokenize texts and the empty one."""
    keys, all_keys, ids = Keys(spec), bytearray(), [np.empty(0, np.int32)]
    sizes, lengths, text_bytes = [0], [], []
    left = chain(texts, [EMPTY])
    while batch := list(islice(left, _AT_ONCE)):
        found = tokenizing.tokens(batch)
        all_keys += b"".join(keys.of_tokens(one.ids) for one in found)
        ids.append(np.concatenate([one.ids for one in found]))
        sizes += [len(one.ids) for one in found]
        lengths += [one.length for one in found]
        text_bytes += [len(text.encode()) for text in batch]
    counts = (np.cumsum(sizes), np.array(lengths), np.array(text_bytes))
    return _Tokenized(texts, bytes(all_keys), np.concatenate(ids), *counts)


def _bounds(sizes: Array, most: int) -> list[int]:
    """Where to cut so that no part is larger than `most`, unless it is one text alone."""
    ends = np.cumsum(sizes)
    bounds = [0]
    while bounds[-1] < len(sizes):
        begin = bounds[-1]
        before = int(ends[begin - 1]) if begin else 0
        bounds.append(max(begin + 1, int(np.searchsorted(ends, before + most, side="right"))))
    return bounds
