"""Why a text is not in a cache: the nearest cause, and the way out.  On the error path only."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from enginecast.cache.asking import Asked
from enginecast.cache.index import open_index
from enginecast.cache.keys import Keys
from enginecast.cache.miss import Miss, shortened
from enginecast.cache.records import read_failures
from enginecast.cache.store import open_store
from enginecast.errors import CacheError, CacheMissError
from enginecast.runtime.arrays import Array

if TYPE_CHECKING:
    from enginecast.cache.reader import EmbeddingCache

_PART = 0.5
"""Of the longer of two texts, the share that the other has to be to pass for what is in it."""


@dataclass(frozen=True)
class Cause:
    """Why, and what to do about it."""

    why: str
    hint: str


def explain(cache: "EmbeddingCache", asked: Asked) -> CacheMissError:
    """The error of a text that is not there."""
    miss = Miss(cache, asked)
    try:
        return _explained(miss)
    except CacheError as error:
        return CacheMissError(
            f"{cache.path}: these {len(asked.tokens)} tokens are not among its {len(cache)} "
            f"entries, and why is not known: {error.message}",
            hint=error.hint,
        )


def _explained(miss: Miss) -> CacheMissError:
    cache = miss.cache
    cause = next(found for look in _CAUSES if (found := look(miss)) is not None)
    return CacheMissError(
        f"{cache.path}: {shortened(miss.text)} ({len(miss.core)} tokens) is not among its "
        f"{len(cache)} entries: {cause.why}",
        hint=cause.hint,
    )


def _nothing(miss: Miss) -> Cause | None:
    """A text without tokens is there only where its tokenizer adds none."""
    if len(miss.asked.tokens):
        return None
    count = miss.asked.sequence
    why = (
        f"none of its {count} ids is attended to: its attention_mask is all zeros"
        if count
        else "it has no token"
    )
    return Cause(why, "Tokenize an empty text, too: most tokenizers add tokens to it.")


def _failed(miss: Miss) -> Cause | None:
    failures = read_failures(miss.cache.encodings)
    if not failures or len(miss.core) > miss.spec.max_length:
        return None
    key = miss.cache.keys.of_tokens(miss.core)
    for failure in failures:
        if failure.key == key:
            return Cause(
                f"it failed when the cache was filled: {failure.reason}",
                "Leave the text out, or fill a cache with an encoder of higher precision.",
            )
    return None


def _too_long(miss: Miss) -> Cause | None:
    longest = miss.spec.max_length
    if len(miss.core) <= longest:
        return None
    cut = next((near for near in miss.near if _cut_from(miss, near.ids)), None)
    there = "" if cut is None else f", to which {shortened(miss.text_of(cut))} was cut there"
    return Cause(
        f"it is longer than {longest} tokens{there}",
        f"Tokenize with truncation=True, max_length={longest}, and fill with --too-long truncate; "
        f"or fill a cache with --max-length {len(miss.core)}.",
    )


def _other_length(miss: Miss) -> Cause | None:
    """The text is there, but padding is part of what was computed, and there is more or less."""
    spec, sequence = miss.spec, miss.asked.sequence
    if not spec.padded or sequence in (None, spec.max_length):
        return None
    same = miss.holding(miss.core) is not None
    there = "the same text is there, but" if same else "all texts there are"
    return Cause(
        f"{there} padded to {spec.max_length} tokens, and this one to {sequence}",
        f"Tokenize with padding='max_length', max_length={spec.max_length}, or fill a cache with "
        f"--max-length {sequence}.",
    )


def _elsewhere(miss: Miss) -> Cause | None:
    """Another encoder of the cache has the text, at another length or from another model."""
    store = open_store(miss.cache.path.parent)
    for name in store.names():
        if name == miss.cache.encodings.name:
            continue
        try:
            other = store.encodings(name)
        except CacheError:  # it is damaged, which is not why
            continue
        same = other.spec.tokenizer == miss.spec.tokenizer
        fits = len(miss.core) <= other.spec.max_length
        key = Keys(other.spec).of_tokens(miss.core) if same and fits else b""
        if key and open_index(other).find(key) is not None:
            return Cause(
                f"the encoder {name} of the same cache has it (max_length "
                f"{other.spec.max_length}, here {miss.spec.max_length})",
                f"Open the cache with name={name!r}, or fill {miss.cache.encodings.name} with it.",
            )
    return None


def _cut(miss: Miss) -> Cause | None:
    """It is how a text begins that is there in full; the end token was put behind."""
    begin = miss.core[: len(miss.core) - miss.added_behind]
    if len(begin) < 2:
        return None
    for near in miss.near:
        if len(near.ids) > len(miss.core) and _begins(near.ids, begin):
            text = miss.text_of(near)
            return Cause(
                f"it is how {shortened(text)} ({len(near.ids)} tokens) begins, as if it was cut at "
                f"{len(miss.core)} tokens",
                f"Tokenize with max_length={miss.spec.max_length}; or fill the cache with it.",
            )
    return None


def _other_padding(miss: Miss) -> Cause | None:
    """The text is there, and the row that was asked for is filled up with another id."""
    row = miss.asked.tokens
    row = row if miss.spec.padding_side == "right" else row[::-1]
    if not len(row) or miss.asked.sequence is None or row[-1] == miss.spec.padding_id:
        return None
    text = row[: int(np.flatnonzero(row != row[-1])[-1:].sum()) + 1]
    for ids in (text, row[: len(text) + 1]):  # the first of the run may be the end token
        ids = ids if miss.spec.padding_side == "right" else ids[::-1]
        place = miss.holding(ids) if len(ids) < len(row) else None
        if place is not None:
            ours = f"{row[-1]} ({miss.token(row[-1])})"
            theirs = f"{miss.spec.padding_id} ({miss.token(miss.spec.padding_id)})"
            return Cause(
                f"it is padded with {ours}, and the cached {shortened(miss.cache.text_at(place))} "
                f"with {theirs}",
                f"Use the tokenizer of this encoder, {miss.cache.encodings.tokenizer_file}: where "
                "a pipeline has several encoders, each has its own.",
            )
    return None


def _mask(miss: Miss) -> Cause | None:
    """Padding counted as text, since no mask said what it is."""
    if not miss.spec.mask or miss.asked.sequence is None or not miss.padding:
        return None
    there = "the text is there" if miss.holding(miss.core) is not None else "texts are there"
    return Cause(
        f"{miss.padding} of its ids are padding, which counts as text "
        f"where no attention_mask says otherwise; {there} without it",
        "Give the tokenizer's attention_mask, or fill a cache with --no-mask.",
    )


def _template(miss: Miss) -> Cause | None:
    """One of two texts is in the other: a template was put around it, or left out."""
    spec = miss.spec
    if spec.template != "{}" and miss.asked.text is None and miss.holds_text(miss.text):
        return Cause(
            f"the cache puts texts into the template {spec.template!r} before they are tokenized",
            "Tokenize the text in its template, as the fill did.",
        )
    words = miss.words
    for near in miss.near:
        other = near.ids[~np.isin(near.ids, miss.added)]
        short, long = sorted((words, other), key=len)
        if len(short) == len(long) or len(short) < _PART * len(long):
            continue
        if _contains(long, short):
            cached = f"the cached text {shortened(miss.text_of(near))}"
            return Cause(
                f"{cached} contains it" if short is words else f"it contains {cached}",
                "Use the template of the cache's spec, which is "
                f"{spec.template!r}; or fill the cache with this text.",
            )
    return None


def _beyond(miss: Miss) -> Cause | None:
    """Ids that the cache's tokenizer does not have."""
    size = miss.tokenizer.get_vocab_size(with_added_tokens=True)
    beyond = miss.core[(miss.core >= size) | (miss.core < 0)]
    if not len(beyond):
        return None
    why = f"token id {beyond[0]} is not among the {size} of the cache's tokenizer"
    return Cause(why, _use_own(miss))


def _tokenizer(miss: Miss) -> Cause | None:
    """Ids that the cache's tokenizer does not make."""
    lacking = [int(one) for one in miss.added if one not in miss.asked.tokens]
    if lacking:
        token = miss.tokenizer.id_to_token(lacking[0])
        why = f"it lacks {token!r}, which the cache's tokenizer adds to each text"
    elif miss.asked.text is None and not miss.comes_back():
        why = "the cache's tokenizer makes other ids of the same text"
    else:
        return None
    return Cause(why, _use_own(miss))


def _damaged(miss: Miss) -> Cause | None:
    damaged = miss.cache.index.errors
    if not damaged:
        return None
    return Cause(
        f"{len(damaged)} shards are damaged, and their texts are not counted: {damaged[0].message}",
        f"`enginecast cache verify {miss.cache.path.parent}` takes them out; then fill again.",
    )


def _unknown(miss: Miss) -> Cause:
    """Nothing but that it was never filled; the text most like it shows typing errors."""
    scored = [_likeness(miss.words, near.ids) for near in miss.near]
    nearest = max(range(len(scored)), key=scored.__getitem__, default=0)
    like = ""
    if scored and scored[nearest] > 0:
        text = shortened(miss.text_of(miss.near[nearest]))
        like = f"; {miss.among}the one most like it is {text}"
    return Cause(
        f"it was not filled{like}",
        "Put it into a file and run `enginecast cache fill ENCODER --texts FILE -o "
        f"{miss.cache.path.parent}`; for texts that are made on the fly (dropped or shuffled tags) "
        "`enginecast.cache.variants` lists what to fill.",
    )


def _use_own(miss: Miss) -> str:
    return f"Use the tokenizer of the cache: {miss.cache.encodings.tokenizer_file}."


def _cut_from(miss: Miss, ids: Array) -> bool:
    """Whether ids are those of the text, cut to the longest."""
    return len(ids) == miss.spec.max_length and _begins(
        miss.core, ids[: len(ids) - miss.added_behind]
    )


def _begins(ids: Array, with_these: Array) -> bool:
    return np.array_equal(ids[: len(with_these)], with_these)


def _contains(ids: Array, part: Array) -> bool:
    if not len(part) or len(part) > len(ids):
        return False
    windows = np.lib.stride_tricks.sliding_window_view(ids, len(part))
    return bool((windows == part).all(axis=1).any())


def _likeness(ids: Array, others: Array) -> float:
    """The share of different ids that two texts have in common."""
    one, other = set(ids.tolist()), set(others.tolist())
    return len(one & other) / max(1, len(one | other))


_CAUSES: tuple[Callable[[Miss], Cause | None], ...] = (
    _nothing,
    _failed,
    _too_long,
    _beyond,
    _other_length,
    _other_padding,
    _mask,
    _elsewhere,
    _cut,
    _template,
    _tokenizer,
    _damaged,
    _unknown,
)
