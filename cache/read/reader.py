"""Reading an embedding cache: by number, by token ids, by text.  Without torch.

    cache = open_cache("CACHE", "text_encoder_2")
    entry = cache.by_text("a photo of a cat")
    entry.outputs["last_hidden_state"]   # [rows, width], a view of the file

What it sees is what was committed when it was opened, until `refresh`: a fill may go on meanwhile.
It may be handed to other processes by fork or by pickling, and used by several threads.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np

from enginecast.cache.encoders.tokenizing import Tokenizing, parse_tokenizer
from enginecast.cache.store.folders import Encodings, open_store
from enginecast.cache.store.index import Index, Location, open_index
from enginecast.cache.store.records import read_failures
from enginecast.cache.store.shard import Entry, shortened
from enginecast.cache.store.spec import About, EncoderSpec, Keys
from enginecast.errors import CacheError, CacheMissError, UsageError
from enginecast.public import some
from enginecast.runtime.values.arrays import Array

Check = Literal["first", "always", "never"]

LOOKED_AT = 10_000
"""Entries that a text that is missing is compared with; of more these, at equal distances: a second
at most."""
_SAMPLES = 16
"""Cached texts that show whether a tokenizer makes the ids again that it reads."""


@dataclass(frozen=True)
class Query:
    """A text that a cache is asked for.

    Args:
        tokens: int64 [tokens], those that the encoder attends to; see `query_of`.
        sequence: length of the row they came in; None: they came bare, and are padded as needed.
        text: where it is known.
    """

    tokens: Array
    sequence: int | None = None
    text: str | None = None


class EmbeddingCache:
    """The entries of one encoder.  Made by `open_cache`.

    Examples:
        >>> from enginecast.cache import open_cache
        >>> cache = open_cache("captions.cache")
        >>> cache.by_text("a red fox").outputs["last_hidden_state"].dtype
        dtype('float32')
        >>> cache.missing(["a red fox", "a text that is not there"])
        ['a text that is not there']
    """

    def __init__(self, encodings: Encodings, *, check: Check) -> None:
        self.encodings = encodings
        self.index: Index = open_index(encodings)
        self._check = check
        self._whole: dict[Path, Array] = {}

    def __repr__(self) -> str:
        """The encoder, how many entries there are, and what each holds."""
        outputs = some(f"{one.name} {one.dtype} of {one.width}" for one in self.spec.outputs)
        return f"EmbeddingCache({str(self.path)!r}: {len(self):,} entries; {outputs})"

    @property
    def path(self) -> Path:
        """The folder of this encoder in the cache."""
        return self.encodings.folder

    @property
    def spec(self) -> EncoderSpec:
        """What the entries depend on: the encoder, its inputs and which outputs are stored."""
        return self.encodings.spec

    @property
    def about(self) -> About:
        """Facts about the encoder that no entry depends on, such as its config and verdict."""
        return self.encodings.about

    def __len__(self) -> int:
        """Entries; each has other token ids."""
        return len(self.index)

    def by_row(self, number: int) -> Entry:
        """Get an entry by its number.

        Args:
            number: 0 to `len` - 1, in the order of the shards.

        Raises:
            IndexError: there is no such entry.
            CacheError: its outputs are damaged.
        """
        return self.get_many([number])[0]

    def by_ids(
        self, ids: Sequence[int] | Array, mask: Sequence[int] | Array | None = None
    ) -> Entry:
        """Get an entry by its token ids.

        Args:
            ids: [sequence], a row of the model's input, or a text's ids without padding.
            mask: [sequence], nonzero for tokens; None: all ids are tokens.

        Raises:
            CacheMissError: there is no such entry; says why.
            CacheError: its outputs are damaged, or the mask does not fit the spec.
        """
        row = np.asarray(ids) if len(ids) else np.empty(0, np.int64)
        if row.ndim != 1 or row.dtype.kind not in "iu":
            raise CacheError(
                f"input_ids: expected one row of whole numbers, got {row.dtype} {list(row.shape)}"
            )
        row = row.astype(np.int64)
        query = Query(row) if mask is None else query_of(self.spec, row, np.asarray(mask))
        return self.look_up([query])[0]

    def by_text(self, text: str) -> Entry:
        """Get an entry by its text, which is cleaned, put into the template and tokenized.

        A text that is too long is truncated.

        Args:
            text: the text, as the encoder's pipeline would get it.

        Raises:
            UsageError: it is not a string.
            CacheMissError: there is no such entry; says why.
            CacheError: its outputs are damaged.
        """
        return self.look_up(self._queries(require_texts([text], "text")))[0]

    def look_up(self, queries: Sequence[Query]) -> list[Entry]:
        """Get entries by their token ids; raises as `by_ids` does.

        Args:
            queries: one for each entry.
        """
        return self._entries([self._find(one) for one in queries])

    def get_many(self, asked: Sequence[int | bytes | str]) -> list[Entry]:
        """Get entries by number, key or text, read in the order of the shards.

        Args:
            asked: numbers (int), keys (bytes of 16) and texts (str), in any order.

        Raises:
            IndexError: there is no entry with this number.
            CacheMissError: there is no entry with this key or text; says why.
            CacheError: outputs are damaged.
        """
        queries = iter(self._queries([one for one in asked if isinstance(one, str)]))
        found = (
            self._find(next(queries)) if isinstance(one, str) else self._at(one) for one in asked
        )
        return self._entries(list(found))

    def keys_of(self, texts: Sequence[str]) -> list[bytes]:
        """Get the keys of texts, 16 bytes each; raises as `by_text` does.

        Args:
            texts: the texts.
        """
        queries = self._queries(require_texts(texts))
        return [self._key(self._find(one)) for one in queries]

    def missing(self, texts: Sequence[str]) -> list[str]:
        """List the texts that have no entry.  `by_text` of one of them says why.

        Args:
            texts: as `by_text` takes them.

        Raises:
            UsageError: one is not a string.
        """
        queries = self._queries(require_texts(texts))
        return [one.text or "" for one in queries if self.locate(one.tokens) is None]

    def __contains__(self, text: object) -> bool:
        """Whether a text has an entry."""
        return not self.missing(require_texts([text], "text"))

    def key_at(self, number: int) -> bytes:
        """Get the key of an entry, 16 bytes.

        Args:
            number: the entry's number.
        """
        return self._key(self._at(number))

    def texts(self) -> Iterator[str]:
        """A text for each entry, by number."""
        for number in range(len(self)):
            yield self.text_at(self.index.row(number))

    def refresh(self) -> int:
        """Pick up new entries.  The numbers of entries may change."""
        before = len(self)
        self.index = open_index(self.encodings, self.index)
        return len(self) - before

    def locate(self, tokens: Array, sequence: int | None = None) -> Location | None:
        """Find the entry of token ids; None: there is none.

        Args:
            tokens: int64 [tokens], see `Query`.
            sequence: length of their padded row; None: they were not padded.
        """
        spec = self.spec
        if len(tokens) > spec.max_length:
            return None
        if spec.padded and sequence not in (None, spec.max_length):
            return None
        location = self.index.find(self.keys.of_tokens(tokens))
        if location is None or not spec.mask:
            return location
        # Padding that is attended to makes the same row as padding that is not.
        return location if np.array_equal(self.ids_at(location), tokens) else None

    def ids_at(self, location: Location) -> Array:
        """Get an entry's token ids, int32 [tokens], without padding.

        Args:
            location: where the entry is.
        """
        return self.index.shards[location.shard].ids(location.text)

    def text_at(self, location: Location) -> str:
        """Get the text of an entry.

        Args:
            location: where the entry is.
        """
        return self.index.shards[location.shard].text(location.text)

    def _key(self, location: Location) -> bytes:
        return self.index.shards[location.shard].key(location.text)

    def _queries(self, texts: Sequence[str]) -> list[Query]:
        tokens = self.tokenizing.tokens(texts) if texts else []
        pairs = zip(texts, tokens, strict=True)
        return [Query(one.ids.astype(np.int64), text=text) for text, one in pairs]

    def _find(self, query: Query) -> Location:
        location = self.locate(query.tokens, query.sequence)
        if location is None:
            raise _miss(self, query)
        return location

    def _at(self, asked: int | bytes) -> Location:
        if not isinstance(asked, bytes):
            if not 0 <= asked < len(self):
                raise IndexError(f"{self.path}: expected an entry 0..{len(self) - 1}, got {asked}")
            return self.index.row(int(asked))
        location = self.index.find(asked)
        if location is None:
            what = f"there is no entry of key {asked.hex()} among {len(self)}"
            raise CacheMissError(f"{self.path}: {what}")
        return location

    def _entries(self, locations: Sequence[Location]) -> list[Entry]:
        entries = {}
        for location in sorted(set(locations)):
            shard = self.index.shards[location.shard]
            if self._check != "never":
                whole = self._whole.setdefault(shard.path, np.zeros(len(shard), bool))
                if not whole[location.text] or self._check == "always":
                    shard.require_whole(location.text)
                    whole[location.text] = True
            entries[location] = shard.entry(location.text)
        return [entries[location] for location in locations]

    @cached_property
    def keys(self) -> Keys:
        return Keys(self.spec)

    @cached_property
    def tokenizing(self) -> Tokenizing:
        """Makes the token ids of texts, with the cache's own tokenizer."""
        return Tokenizing(self.encodings.read_tokenizer(), self.spec)

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
        path: the cache's folder.
        name: the encoder's name; None: the only encoder.
        check: when to compare outputs with their stored checksums: "first" (when this process
            first reads them), "always" or "never".

    Raises:
        CacheError: there is no such cache or encoder, or it is damaged.
        UsageError: there is no such `check`.

    Examples:
        >>> from enginecast.cache import open_cache
        >>> open_cache("captions.cache")
        EmbeddingCache('...captions.cache...': 3 entries; last_hidden_state float32 of ...)
    """
    if check not in ("first", "always", "never"):
        raise UsageError(f"check: expected first, always or never, got {check!r}")
    return EmbeddingCache(open_store(path).encodings(name), check=check)


def require_texts(texts: Iterable[Any], name: str = "texts") -> list[str]:
    """Texts as a list; a UsageError names what is none: a number is not that of an entry here."""
    if isinstance(texts, str):
        raise UsageError(f"{name}: expected a list of texts, got one: {texts!r}")
    made = []
    for number, text in enumerate(texts):
        if not isinstance(text, str):
            raise UsageError(f"{name}: expected a text at {number}, got {text!r:.80}")
        made.append(str(text))
    return made


def query_of(spec: EncoderSpec, row: Array, mask: Array | None) -> Query:
    """What a row as the model gets it asks for: the ids that the encoder attends to.

    An encoder that takes a mask and is given none attends to the whole row, so then all its ids are
    tokens; that is right for a text that fills its row, and a miss for one with padding.

    Args:
        row: int64 [sequence]
        mask: [sequence], not zero for tokens; None: none was given.

    Raises:
        CacheError: the mask has holes, pads the other side, or has no place in the spec.
    """
    if mask is None:
        return Query(row, len(row))
    if mask.shape != row.shape:
        raise CacheError(
            f"attention_mask: expected one value for each of {len(row)} ids, got {list(mask.shape)}"
        )
    kept = np.flatnonzero(mask)
    if len(kept) == len(row):
        return Query(row, len(row))
    if not spec.mask:
        raise CacheError(
            f"attention_mask: {len(row) - len(kept)} of {len(row)} ids are masked, but these "
            "outputs were computed without a mask, and padding changed them",
            hint="Give no mask, as the fill did, or fill a cache with --mask.",
        )
    begins = len(row) - len(kept) if spec.padding_side == "left" else 0
    if len(kept) and kept[-1] - kept[0] + 1 != len(kept):
        if not spec.keep_end or kept[0] or kept[-1] + 1 < len(row):
            raise CacheError("attention_mask: expected contiguous tokens, but the mask has gaps")
        begins = 0  # padding before the template's end
    if len(kept) and kept[0] != begins:
        raise CacheError(
            f"attention_mask: expected padding on the {spec.padding_side}, as in the cache's spec, "
            f"but the tokens are at {kept[0]} to {kept[-1]} of {len(row)}",
            hint=f"Set the tokenizer's padding_side to {spec.padding_side!r}.",
        )
    return Query(row[kept], len(row))


def _miss(cache: EmbeddingCache, query: Query) -> CacheMissError:
    """Why a text is not there, and the way out: the nearest cause."""
    entries = f"among its {len(cache)} entries"
    try:
        miss = _Miss(cache, query)
        why, hint = next(_causes(miss))
        what = f"{shortened(miss.text)} ({len(miss.core)} tokens) is not {entries}: {why}"
    except CacheError as error:
        why, hint = error.message, error.hint
        what = f"these {len(query.tokens)} tokens are not {entries}, and why is not known: {why}"
    return CacheMissError(f"{cache.path}: {what}", hint=hint)


class _Miss:
    def __init__(self, cache: EmbeddingCache, query: Query) -> None:
        self.cache, self.spec, self.query = cache, cache.spec, query
        self.core = self.bare(query.tokens)
        self.tokenizer = parse_tokenizer(cache.encodings.read_tokenizer())
        self.tokenizer.no_padding()
        self.tokenizer.no_truncation()
        self.size = self.tokenizer.get_vocab_size(with_added_tokens=True)
        self.added = self.encode("")
        """Ids that the tokenizer adds to each text."""
        self.text = self.read(self.core) if query.text is None else query.text

    def encode(self, text: str) -> Array:
        special = self.spec.special_tokens
        return np.array(self.tokenizer.encode(text, add_special_tokens=special).ids, np.int64)

    def is_in_another_template(self) -> bool:
        """Whether the ids do not begin and end as the template does."""
        words = self.core[~np.isin(self.core, self.added)]
        text = str(self.tokenizer.decode(words.tolist(), skip_special_tokens=False)).strip()
        before, after = (part.strip() for part in self.spec.template.split("{}"))
        return not (text.startswith(before) and text.endswith(after))

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
        made = self.encode(self.read(ids))
        return np.array_equal(self.bare(made), ids)

    def near(self, most: int) -> list[tuple[Location, Array]]:
        """Entries at equal distances, and their ids."""
        count = len(self.cache)
        numbers = np.linspace(0, count - 1, min(count, most)).astype(np.int64)
        found = (array.tolist() for array in self.cache.index.rows(numbers))
        return [(at, self.bare(self.cache.ids_at(at))) for at in map(Location, *found)]


def _causes(miss: _Miss) -> Iterator[tuple[str, str]]:
    """What may be wrong and the way out, the nearest first: text, padding, ids."""
    cache, spec, core = miss.cache, miss.spec, miss.core
    tokens, sequence, longest = miss.query.tokens, miss.query.sequence, spec.max_length
    if not len(tokens):
        zeros = f"none of its {sequence} ids is attended to: its mask is all zeros"
        why = zeros if sequence else "it has no token"
        yield why, "Tokenize an empty text, too: most tokenizers add tokens to it."
    keys = [cache.keys.of_tokens(ids) for ids in (tokens, core) if len(ids) <= longest]
    for failure in read_failures(cache.encodings, cache.index):
        if failure.key in keys:
            hint = "Leave the text out, or fill a cache with an encoder of higher precision."
            yield f"it failed when the cache was filled: {failure.reason}", hint
    if len(core) > longest:
        yield (
            f"it is longer than {longest} tokens",
            f"Tokenize with truncation=True, max_length={longest}, and fill with --too-long "
            f"truncate; or fill a cache with --max-length {len(core)}.",
        )
    if spec.padded and sequence not in (None, longest):
        there = "the same text is there, but" if miss.holds_core() else "all texts there are"
        yield (
            f"{there} padded to {longest} tokens, and this one to {sequence}",
            f"Tokenize with padding='max_length', max_length={longest}, or fill a cache "
            f"with --max-length {sequence}.",
        )
    end = spec.padding_id in miss.added  # which is not padding
    padding = len(tokens) - len(core) - end
    if spec.mask and sequence is not None and padding > 0:
        there = "the text is there" if miss.holds_core() else "texts are there"
        yield (
            f"{padding} of its ids are padding, which counts as text where no attention_mask says "
            f"otherwise; {there} without it",
            "Give the tokenizer's attention_mask, or fill a cache with --no-mask.",
        )
    if spec.template != "{}" and miss.query.text is None and miss.text in cache:
        why = f"the cache puts texts into the template {spec.template!r} before they are tokenized"
        yield why, "Tokenize the text in its template, as the fill did."
    use_own = f"Use the tokenizer of the cache: {cache.encodings.tokenizer_file}."
    for number in core[(core >= miss.size) | (core < 0)]:
        yield f"token id {number} is not among the {miss.size} of the cache's tokenizer", use_own
    near = miss.near(LOOKED_AT)
    held = (cache.text_at(place) for place, _ in near)
    inside = next((text for text in held if text and text in miss.text), None)
    if inside is not None and miss.is_in_another_template():
        yield (
            f"{shortened(inside)} is there in the template {spec.template!r}, and this one is in"
            " another",
            "Fill a cache with the template of what asks: --template, or --for PIPELINE.",
        )
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
                f"Tokenize with max_length={longest}; or fill the cache with it.",
            )
    for number in miss.added[~np.isin(miss.added, tokens)]:
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
        "Put it into a file and run `enginecast cache fill ENCODER --prompts FILE -o "
        f"{cache.path.parent}`; for texts that are made on the fly (dropped or shuffled tags) "
        "`enginecast.cache.Variants` lists what to fill.",
    )
