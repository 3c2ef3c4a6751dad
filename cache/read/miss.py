"""Why a text is not in a cache: the nearest cause, and the way out.  On the error path only."""

from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from enginecast.cache.encoders.tokenizing import parse_tokenizer
from enginecast.cache.store.index import Location
from enginecast.cache.store.records import read_failures
from enginecast.cache.store.shard import shortened
from enginecast.errors import CacheError, CacheMissError
from enginecast.runtime.values.arrays import Array

if TYPE_CHECKING:
    from enginecast.cache.read.reader import EmbeddingCache, Query

LOOKED_AT = 10_000
"""Entries that a text is compared with; of more these, at equal distances: a second at most."""
_SAMPLES = 16
"""Cached texts that show whether a tokenizer makes the ids again that it reads."""


def explain(cache: "EmbeddingCache", query: "Query") -> CacheMissError:
    """The error of a text that is not there."""
    entries = f"among its {len(cache)} entries"
    try:
        miss = _Miss(cache, query)
        why, hint = next(chain(_wrong_text(miss), _wrong_padding(miss), _wrong_ids(miss)))
        what = f"{shortened(miss.text)} ({len(miss.core)} tokens) is not {entries}: {why}"
    except CacheError as error:
        why, hint = error.message, error.hint
        what = f"these {len(query.tokens)} tokens are not {entries}, and why is not known: {why}"
    return CacheMissError(f"{cache.path}: {what}", hint=hint)


class _Miss:
    def __init__(self, cache: "EmbeddingCache", query: "Query") -> None:
        self.cache, self.spec, self.query = cache, cache.spec, query
        self.core = self.bare(query.tokens)
        self.tokenizer = parse_tokenizer(cache.encodings.read_tokenizer())
        self.tokenizer.no_padding()
        self.tokenizer.no_truncation()
        self.size = self.tokenizer.get_vocab_size(with_added_tokens=True)
        self.added = np.array(self.tokenizer.encode("").ids, np.int64)
        """Ids that the tokenizer adds to each text."""
        self.text = self.read(self.core) if query.text is None else query.text

    def bare(self, ids: Array) -> Array:
        """Ids without the padding at their end, and without an end token that pads."""
        kept = np.flatnonzero(ids != self.spec.padding_id)
        if not len(kept):
            return ids[:0]
        return ids[: kept[-1] + 1] if self.spec.padding_side == "right" else ids[kept[0] :]

    def holds_core(self) -> bool:
        end, left = [self.spec.padding_id], self.spec.padding_side == "left"
        longer = np.concatenate((end, self.core) if left else (self.core, end))
        return any(self.cache.locate(ids) is not None for ids in (self.core, longer))

    def read(self, ids: Array) -> str:
        words = ids[~np.isin(ids, self.added) & (ids >= 0) & (ids < self.size)]
        return str(self.tokenizer.decode(words.tolist()))

    def comes_back(self, ids: Array) -> bool:
        made = np.array(self.tokenizer.encode(self.read(ids)).ids, np.int64)
        return np.array_equal(self.bare(made), ids)

    def near(self, most: int) -> list[tuple[Location, Array]]:
        """Entries at equal distances, and their ids."""
        count = len(self.cache)
        numbers = np.linspace(0, count - 1, min(count, most)).astype(np.int64)
        found = (array.tolist() for array in self.cache.index.rows(numbers))
        return [(at, self.bare(self.cache.ids_at(at))) for at in map(Location, *found)]


def _wrong_text(miss: _Miss) -> Iterator[tuple[str, str]]:
    tokens, longest = miss.query.tokens, miss.spec.max_length
    if not len(tokens):
        zeros = f"none of its {miss.query.sequence} ids is attended to: its mask is all zeros"
        why = zeros if miss.query.sequence else "it has no token"
        yield why, "Tokenize an empty text, too: most tokenizers add tokens to it."
    rows = [ids for ids in (tokens, miss.core) if len(ids) <= longest]
    keys = [miss.cache.keys.of_tokens(ids) for ids in rows]
    for failure in read_failures(miss.cache.encodings, miss.cache.index):
        if failure.key in keys:
            hint = "Leave the text out, or fill a cache with an encoder of higher precision."
            yield f"it failed when the cache was filled: {failure.reason}", hint
    if len(miss.core) > longest:
        yield (
            f"it is longer than {longest} tokens",
            f"Tokenize with truncation=True, max_length={longest}, and fill with --too-long "
            f"truncate; or fill a cache with --max-length {len(miss.core)}.",
        )


def _wrong_padding(miss: _Miss) -> Iterator[tuple[str, str]]:
    spec, sequence = miss.spec, miss.query.sequence
    if spec.padded and sequence not in (None, spec.max_length):
        there = "the same text is there, but" if miss.holds_core() else "all texts there are"
        yield (
            f"{there} padded to {spec.max_length} tokens, and this one to {sequence}",
            f"Tokenize with padding='max_length', max_length={spec.max_length}, or fill a cache "
            f"with --max-length {sequence}.",
        )
    end = spec.padding_id in miss.added  # which is not padding
    padding = len(miss.query.tokens) - len(miss.core) - end
    if spec.mask and sequence is not None and padding > 0:
        there = "the text is there" if miss.holds_core() else "texts are there"
        yield (
            f"{padding} of its ids are padding, which counts as text where no attention_mask says "
            f"otherwise; {there} without it",
            "Give the tokenizer's attention_mask, or fill a cache with --no-mask.",
        )


def _wrong_ids(miss: _Miss) -> Iterator[tuple[str, str]]:
    cache, core, template = miss.cache, miss.core, miss.spec.template
    if template != "{}" and miss.query.text is None and miss.text in cache:
        why = f"the cache puts texts into the template {template!r} before they are tokenized"
        yield why, "Tokenize the text in its template, as the fill did."
    use_own = f"Use the tokenizer of the cache: {cache.encodings.tokenizer_file}."
    for number in core[(core >= miss.size) | (core < 0)]:
        yield f"token id {number} is not among the {miss.size} of the cache's tokenizer", use_own
    near = miss.near(LOOKED_AT)
    words, best, like = set(core.tolist()) - set(miss.added.tolist()), 0.0, ""
    for place, ids in near:
        others = set(ids.tolist())
        likeness = len(words & others) / max(1, len(words | others))
        if likeness > best:
            best, like = likeness, f"{shortened(cache.text_at(place))} ({len(ids)} tokens)"
        begin = core[:-1] if len(core) and core[-1] in miss.added else core
        if len(ids) > len(core) > 2 and np.array_equal(ids[: len(begin)], begin):
            yield (
                f"it is how {shortened(cache.text_at(place))} ({len(ids)} tokens) begins, as if it "
                f"was cut at {len(core)} tokens",
                f"Tokenize with max_length={miss.spec.max_length}; or fill the cache with it.",
            )
    for number in miss.added[~np.isin(miss.added, miss.query.tokens)]:
        token = miss.tokenizer.id_to_token(int(number))
        yield f"it lacks {token!r}, which the cache's tokenizer adds to each text", use_own
    # Not all tokenizers make the same ids of the text that they read from them.
    own = miss.query.text is None and all(miss.comes_back(ids) for _, ids in near[:_SAMPLES])
    if own and not miss.comes_back(core):
        yield "the cache's tokenizer makes other ids of the same text, or other padding", use_own
    if cache.index.errors:
        yield (
            f"{len(cache.index.errors)} shards are damaged, and their texts are not counted: "
            f"{cache.index.errors[0].message}",
            f"`enginecast cache verify {cache.path.parent}` takes them out; then fill again.",
        )
    among = f"of {len(near)} that were looked at, " if len(near) < len(cache) else ""
    yield (
        "it was not filled" + (f"; {among}the one most like it is {like}" if like else ""),
        "Put it into a file and run `enginecast cache fill ENCODER --texts FILE -o "
        f"{cache.path.parent}`; for texts that are made on the fly (dropped or shuffled tags) "
        "`enginecast.cache.Variants` lists what to fill.",
    )
