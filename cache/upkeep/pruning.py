"""Removing what a cache does not need: leftovers, doubles, texts nobody wants; joining shards.

Entries that stay are committed in new shards before the old ones go.  A process that was reading
goes on: what it has mapped stays on disk until it lets go.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np

from enginecast.cache.encoders.tokenizing import Tokenizing
from enginecast.cache.store.claims import sweep
from enginecast.cache.store.disk import bytes_in, disk_errors
from enginecast.cache.store.folders import Encodings, Store
from enginecast.cache.store.index import as_keys, index_of, open_index
from enginecast.cache.store.mapping import file_id
from enginecast.cache.store.shard import Shard, shard_size
from enginecast.cache.store.spec import Keys
from enginecast.cache.upkeep.rewriting import (
    SHARD_BYTES,
    chunked,
    commit_all,
    entries_of,
    only_keeper,
    remove_file,
)
from enginecast.errors import CacheError
from enginecast.runtime.values.arrays import Array


@dataclass(frozen=True)
class Pruned:
    """What was removed, or would be.

    Args:
        leftovers: files and folders of writers that were killed.
        quarantined: damaged shards that `verify` had moved away.
        doubles, unwanted, kept: entries.
        rewritten: shards whose entries went into others, or nowhere; `made`: the others.
        freed: bytes on disk.
    """

    name: str
    leftovers: int
    quarantined: int
    doubles: int
    unwanted: int
    rewritten: int
    made: int
    kept: int
    freed: int


def prune_store(
    store: Store,
    name: str | None = None,
    keep: Sequence[str] | None = None,
    *,
    dry_run: bool = False,
    shard_bytes: int = SHARD_BYTES,
) -> list[Pruned]:
    """Prune encoders of a cache.

    Args:
        name: of the encoder; None: all.
        keep: texts as they were given to the fill; all others go, but for the empty one; None:
            none.
        shard_bytes: size of a full shard; those of less than half are joined.

    Raises:
        CacheError: no such encoder, a damaged shard, another command is moving shards, or an
            encoder would keep none of its texts but the empty one.  Nothing was removed.
    """
    names = [name] if name else store.names()
    encoders = [store.encodings(one) for one in names] or [store.encodings()]
    wanted = [None if keep is None else wanted_keys(one, keep) for one in encoders]
    with disk_errors(store.root), ExitStack() as locks:
        for one in encoders:
            locks.enter_context(only_keeper(one))
        prunings = [
            _look_at(one, keys, shard_bytes) for one, keys in zip(encoders, wanted, strict=True)
        ]
        return [
            _prune(one, pruning, shard_bytes, dry_run=dry_run)
            for one, pruning in zip(encoders, prunings, strict=True)
        ]


def wanted_keys(encodings: Encodings, texts: Sequence[str]) -> Array:
    """The keys of texts and of the empty one, which is the first: S16 [texts], see `as_keys`."""
    keys = Keys(encodings.spec)
    tokens = Tokenizing(encodings.read_tokenizer(), encodings.spec).tokens(["", *texts])
    found = dict.fromkeys(keys.of_tokens(one.ids) for one in tokens)
    return as_keys(np.frombuffer(b"".join(found), np.uint8))


@dataclass(frozen=True)
class _Pruning:
    """What becomes of the shards."""

    old: tuple[tuple[Shard, Array], ...]
    """Those that go, each with the numbers of its entries that go into others."""
    kept: int
    doubles: int
    unwanted: int


def _look_at(encodings: Encodings, wanted: Array | None, shard_bytes: int) -> _Pruning:
    shards = open_index(encodings, keep=False).require_whole().shards
    # Of doubles the one in the largest shard stays: then the others often go without a rewrite.
    index = index_of(sorted(shards, key=lambda shard: (-len(shard), shard.path.name)))
    # Which entries have a key that is not in a shard before: bool [texts] of each shard.
    first = [np.zeros(len(shard), bool) for shard in index.shards]
    numbers, texts = index.rows(np.arange(len(index)))
    for number, one in enumerate(first):
        one[texts[numbers == number]] = True
    meant = [
        np.ones(len(shard), bool) if wanted is None else np.isin(as_keys(shard.keys), wanted)
        for shard in index.shards
    ]
    live = [one & other for one, other in zip(first, meant, strict=True)]
    if wanted is not None:  # the empty text, which every fill stores, is left of a wrong file, too
        others = [~np.isin(as_keys(shard.keys), wanted[:1]) for shard in index.shards]
        left = any((one & other).any() for one, other in zip(live, others, strict=True))
        if not left and any(one.any() for one in others):
            raise CacheError(
                f"{encodings.folder}: holds none of the texts to keep; nothing would be left",
                hint="Check --keep and --column; to be rid of the entries remove the folder.",
            )
    chosen = _chosen(index.shards, live, shard_bytes)
    # Damaged entries are not copied, and the double of one is not removed.
    for number, shard in enumerate(index.shards):
        if number in chosen:
            for text in np.flatnonzero(first[number]):
                shard.require_whole(int(text))
        twins = index.locations(index.find_all(shard.keys[~first[number]]))
        for owner, text in zip(*twins, strict=True):
            index.shards[owner].require_whole(int(text))
    return _Pruning(
        old=tuple((index.shards[number], np.flatnonzero(live[number])) for number in chosen),
        kept=sum(int(one.sum()) for one in live),
        doubles=index.doubles,
        unwanted=sum(int((one & ~other).sum()) for one, other in zip(first, meant, strict=True)),
    )


def _chosen(shards: Sequence[Shard], live: Sequence[Array], shard_bytes: int) -> list[int]:
    """Shards to rewrite: those with something to remove, and small ones where there are several."""
    numbers = range(len(shards))
    dirty = {number for number in numbers if not live[number].all()}
    small = {
        number
        for number in set(numbers) - dirty
        if shards[number].path.stat().st_size * 2 < shard_bytes
    }
    rewritten = sum(bool(live[number].any()) for number in dirty)
    return sorted(dirty | small if len(small) + rewritten > 1 else dirty)


def _prune(encodings: Encodings, pruning: _Pruning, shard_bytes: int, *, dry_run: bool) -> Pruned:
    leftovers = sweep(encodings, dry_run=True)
    quarantine = sorted((encodings.folder / "quarantine").glob("*"))
    freed = bytes_in([*leftovers, *quarantine])
    if dry_run:
        made = [
            shard_size(
                encodings.spec,
                [len(entry.ids) for entry in chunk],
                sum(len(entry.text.encode()) for entry in chunk),
            )
            for chunk in chunked(entries_of(pruning.old), shard_bytes)
        ]
        freed += bytes_in(shard.path for shard, _ in pruning.old)
    else:
        sweep(encodings)
        identities = {shard.path: file_id(shard.path.stat()) for shard, _ in pruning.old}
        paths = commit_all(encodings, entries_of(pruning.old), shard_bytes=shard_bytes)
        made = [path.stat().st_size for path in paths]
        freed += sum(remove_file(path, identity) for path, identity in identities.items())
        for path in quarantine:
            with disk_errors(path):
                path.unlink(missing_ok=True)
    return Pruned(
        encodings.name,
        leftovers=len(leftovers),
        quarantined=sum(path.suffix != ".json" for path in quarantine),
        doubles=pruning.doubles,
        unwanted=pruning.unwanted,
        rewritten=len(pruning.old),
        made=len(made),
        kept=pruning.kept,
        freed=freed - sum(made),
    )
