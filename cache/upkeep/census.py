"""What a cache holds, counted without reading outputs."""

from collections import Counter
from dataclasses import dataclass

import numpy as np

from enginecast.cache.store.claims import sweep
from enginecast.cache.store.disk import bytes_in, disk_errors
from enginecast.cache.store.folders import Encodings, Store
from enginecast.cache.store.index import Index, open_index
from enginecast.cache.store.records import read_failures, read_truncated
from enginecast.cache.store.shard import SUFFIX
from enginecast.cache.store.spec import About, EncoderSpec, fingerprint
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
        tokens: least, median and largest of a text; None: no texts.
        rows, bytes: stored of all texts.
        padded_bytes: that one file a text would take, its outputs padded to the longest text and in
            fp32, as trainers write them.
        doubles: entries whose key is there twice.
        failed: texts that were not stored, by reason.
        leftovers: files and folders of writers that were killed.
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
    """Count what a cache holds of the encoder of a name; None: of all."""
    with disk_errors(store.root):
        return [_census(store.encodings(one)) for one in ([name] if name else store.names())]


def _census(encodings: Encodings) -> Census:
    index, tokens, rows = _measured(encodings)
    spread = None
    if len(index):
        spread = int(tokens.min()), float(np.median(tokens)), int(tokens.max())
    leftovers = sweep(encodings, dry_run=True)
    quarantine = encodings.folder / "quarantine"
    spec = encodings.spec
    padded = ((one.width, spec.max_length if one.per == "token" else 1) for one in spec.outputs)
    return Census(
        name=encodings.name,
        fingerprint=fingerprint(spec),
        about=encodings.about,
        spec=spec,
        texts=len(index),
        tokens=spread,
        rows=int(rows.sum()),
        bytes=bytes_in(shard.path for shard in index.shards),
        padded_bytes=len(index) * sum(width * count for width, count in padded) * _FP32,
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


def _measured(encodings: Encodings, attempts: int = _ATTEMPTS) -> tuple[Index, Array, Array]:
    """All that is there, and tokens and rows of each text: int64 [texts]."""
    index = open_index(encodings, keep=False)
    numbers, texts = index.rows(np.arange(len(index)))
    tokens, rows = np.zeros((2, len(index)), np.int64)
    try:
        for number, shard in enumerate(index.shards):
            own = numbers == number
            opened = shard.closed()  # mapped for this only: a cache may have many shards
            tokens[own] = opened.tokens[texts[own]]
            rows[own] = opened.rows[texts[own]]
    except CacheError as error:  # shards were joined meanwhile: begin again
        if attempts == 1 or not isinstance(error.__cause__, FileNotFoundError):
            raise
        return _measured(encodings, attempts - 1)
    return index, tokens, rows
