"""What a cache holds, counted without reading outputs."""

from collections import Counter
from dataclasses import dataclass

import numpy as np

from enginecast.cache.store.claims import sweep
from enginecast.cache.store.disk import bytes_in
from enginecast.cache.store.index import Index, open_index
from enginecast.cache.store.records import read_failures, read_truncated
from enginecast.cache.store.shard import SUFFIX
from enginecast.cache.store.spec import About, EncoderSpec, fingerprint
from enginecast.cache.store.store import Encodings, Store
from enginecast.errors import CacheError
from enginecast.runtime.values.arrays import Array

_ATTEMPTS = 5
"""How often a cache is opened at most whose shards go while they are counted."""
_FP32 = 4
"""Bytes of the values that trainers write, numpy's format having no bfloat16."""


@dataclass(frozen=True)
class Census:
    """What is there of one encoder.

    Args:
        texts: entries; each has other token ids.
        tokens: least, median and largest of a text; None: no texts.
        rows: stored of all texts.
        bytes: of the shards.
        padded_bytes: that one file a text would take, its outputs padded to the longest text and in
            fp32, as trainers write them.
        doubles: entries whose key is there twice.
        failed: texts that were not stored, by reason.
        truncated: texts that were cut.
        leftovers: files and folders of writers that were killed.
        quarantined: shards that were damaged.
        damaged: what is wrong with shards that cannot be opened.
    """

    name: str
    fingerprint: str
    about: About
    spec: EncoderSpec
    texts: int
    tokens: tuple[int, float, int] | None
    rows: int
    bytes: int
    padded_bytes: int
    shards: int
    doubles: int
    failed: dict[str, int]
    truncated: int
    leftovers: int
    leftover_bytes: int
    quarantined: int
    quarantined_bytes: int
    damaged: tuple[str, ...]


def census_of(store: Store, name: str | None = None) -> list[Census]:
    """Count what a cache holds.

    Args:
        name: of the encoder; None: all.

    Raises:
        CacheError: no such encoder, or a damaged spec.
    """
    if name is not None:
        return [_census(store.encodings(name))]
    return [_census(store.encodings(one)) for one in store.names()]


def _census(encodings: Encodings) -> Census:
    index, (tokens, rows, size) = _measured(encodings)
    spread = (
        (int(tokens.min()), float(np.median(tokens)), int(tokens.max())) if len(index) else None
    )
    leftovers = sweep(encodings, dry_run=True)
    quarantine = encodings.folder / "quarantine"
    spec = encodings.spec
    return Census(
        name=encodings.name,
        fingerprint=fingerprint(spec),
        about=encodings.about,
        spec=spec,
        texts=len(index),
        tokens=spread,
        rows=int(rows.sum()),
        bytes=size,
        padded_bytes=len(index) * _padded_bytes(spec),
        shards=len(index.shards),
        doubles=index.doubles,
        failed=dict(Counter(one.reason for one in read_failures(encodings, index)).most_common()),
        truncated=len(read_truncated(encodings)),
        leftovers=len(leftovers),
        leftover_bytes=bytes_in(leftovers),
        quarantined=len(list(quarantine.glob(f"*{SUFFIX}"))),
        quarantined_bytes=bytes_in([quarantine]),
        damaged=tuple(error.message for error in index.errors),
    )


def _measured(encodings: Encodings) -> tuple[Index, tuple[Array, Array, int]]:
    """All that is there, and its sizes; see `_sizes`.  Begins again when shards were joined."""
    for left in reversed(range(_ATTEMPTS)):
        index = open_index(encodings, keep=False)
        try:
            return index, _sizes(index)
        except CacheError as error:
            if not left or not isinstance(error.__cause__, FileNotFoundError):
                raise
    raise AssertionError


def _sizes(index: Index) -> tuple[Array, Array, int]:
    """Tokens and rows of each text, int64 [texts] each, and bytes of the shards."""
    size = 0
    numbers, texts = index.rows(np.arange(len(index)))
    tokens, rows = np.zeros(len(index), np.int64), np.zeros(len(index), np.int64)
    for number, shard in enumerate(index.shards):
        own = numbers == number
        opened = shard.closed()  # mapped for this only: a cache may have many shards
        tokens[own] = opened.tokens[texts[own]]
        rows[own] = opened.rows[texts[own]]
        size += opened.size
    return tokens, rows, size


def _padded_bytes(spec: EncoderSpec) -> int:
    """Of one text."""
    return sum(
        one.width * (spec.max_length if one.per == "token" else 1) * _FP32 for one in spec.outputs
    )
