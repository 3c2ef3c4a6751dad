"""Removing what a cache does not need: leftovers, doubles, texts nobody wants; joining shards.

Entries that stay are committed in new shards before the old ones go.  A process that was reading
goes on: what it has mapped stays on disk until it lets go.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from enginecast.cache.encoders.tokenizing import Tokenizing
from enginecast.cache.store.claims import sweep
from enginecast.cache.store.disk import disk_error
from enginecast.cache.store.index import as_keys, index_of, open_index
from enginecast.cache.store.mapping import file_id
from enginecast.cache.store.shard import Entry, Shard, shard_size
from enginecast.cache.store.spec import EncoderSpec, Keys
from enginecast.cache.store.store import Encodings, Store
from enginecast.cache.upkeep.rewriting import (
    SHARD_BYTES,
    chunked,
    commit_all,
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
        doubles: entries whose key was there twice.
        unwanted: entries of texts that were not to be kept.
        rewritten: shards whose entries went into others, or nowhere.
        made: shards that they went into.
        kept: entries that the cache holds now.
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
        keep: texts as they were given to the fill; all others go, but for the empty one.  None: all
            stay.
        dry_run: change nothing.
        shard_bytes: size of a full shard; those of less than half are joined.

    Raises:
        CacheError: no such encoder, a damaged shard, another command is moving shards, or an
            encoder would keep none of its texts but the empty one.  Nothing was removed.
    """
    names = [name] if name else store.names()
    encoders = [store.encodings(one) for one in names] or [store.encodings()]
    wanted = [None if keep is None else wanted_keys(one, keep) for one in encoders]
    with ExitStack() as locks:
        for one in encoders:
            locks.enter_context(only_keeper(one))
        prunings = [
            _look_at(one, keys, shard_bytes) for one, keys in zip(encoders, wanted, strict=True)
        ]
        return [
            _prune(one, pruning, dry_run=dry_run)
            for one, pruning in zip(encoders, prunings, strict=True)
        ]


def wanted_keys(encodings: Encodings, texts: Sequence[str]) -> Array:
    """The keys of texts and of the empty one, which is the first: uint8 [texts, 16].

    Raises:
        CacheError: the cache's tokenizer cannot be read.
    """
    keys = Keys(encodings.spec)
    tokens = Tokenizing(encodings.read_tokenizer(), encodings.spec).tokens(["", *texts])
    found = dict.fromkeys(keys.of_tokens(one.ids) for one in tokens)
    return np.frombuffer(b"".join(found), np.uint8).reshape(len(found), -1)


@dataclass(frozen=True)
class _Pruning:
    """What becomes of the shards.

    Args:
        old: shards that go.
        stay: of each of these, the numbers of the entries that go into others.
    """

    old: tuple[Shard, ...]
    stay: tuple[Array, ...]
    kept: int
    doubles: int
    unwanted: int
    shard_bytes: int

    def entries(self) -> Iterator[Entry]:
        for shard, numbers in zip(self.old, self.stay, strict=True):
            yield from (shard.entry(int(number)) for number in numbers)


def _look_at(encodings: Encodings, wanted: Array | None, shard_bytes: int) -> _Pruning:
    index = open_index(encodings, keep=False).require_whole()
    # Of doubles the one in the largest shard stays: then the others often go without a rewrite.
    shards = sorted(index.shards, key=lambda shard: (-len(shard), shard.path.name))
    first = _first_of_each(shards)
    meant = [_meant(shard, wanted) for shard in shards]
    live = [one & other for one, other in zip(first, meant, strict=True)]
    if wanted is not None:
        _require_some(encodings, shards, live, empty=wanted[:1])
    chosen = _chosen(shards, live, shard_bytes)
    _require_whole(shards, first, set(chosen))
    return _Pruning(
        old=tuple(shards[number] for number in chosen),
        stay=tuple(np.flatnonzero(live[number]) for number in chosen),
        kept=sum(int(one.sum()) for one in live),
        doubles=sum(int((~one).sum()) for one in first),
        unwanted=sum(int((one & ~other).sum()) for one, other in zip(first, meant, strict=True)),
        shard_bytes=shard_bytes,
    )


def _first_of_each(shards: Sequence[Shard]) -> list[Array]:
    """Which entries have a key that is not in a shard before: bool [texts] of each shard."""
    index = index_of(shards)
    first = [np.zeros(len(shard), bool) for shard in shards]
    numbers, texts = index.rows(np.arange(len(index)))
    for number, one in enumerate(first):
        one[texts[numbers == number]] = True
    return first


def _meant(shard: Shard, wanted: Array | None) -> Array:
    """Which entries are to be kept: bool [texts]."""
    if wanted is None:
        return np.ones(len(shard), bool)
    return np.isin(as_keys(shard.keys), as_keys(wanted))


def _require_some(
    encodings: Encodings, shards: Sequence[Shard], live: Sequence[Array], *, empty: Array
) -> None:
    """Refuse to keep nothing but the empty text, which every fill stores: a wrong file does."""
    others = [~np.isin(as_keys(shard.keys), as_keys(empty)) for shard in shards]
    left = any((one & other).any() for one, other in zip(live, others, strict=True))
    if not left and any(one.any() for one in others):
        raise CacheError(
            f"{encodings.folder}: holds none of the texts to keep; nothing would be left",
            hint="Check --keep and --column; to be rid of the entries remove the folder.",
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


def _require_whole(shards: Sequence[Shard], first: Sequence[Array], chosen: set[int]) -> None:
    """Refuse to copy damaged entries, and to remove the double of one."""
    index = index_of(shards)
    for number, shard in enumerate(shards):
        lost = ~first[number]
        places = index.find_all(shard.keys[lost])
        twins = zip(*index.places(places), strict=True)
        copied = [(number, int(text)) for text in np.flatnonzero(~lost)] * (number in chosen)
        for owner, text in [*copied, *((int(one), int(other)) for one, other in twins)]:
            shards[owner].require_whole(text)


def _prune(encodings: Encodings, pruning: _Pruning, *, dry_run: bool) -> Pruned:
    leftovers = _sweep(encodings, dry_run=dry_run)
    quarantine = sorted((encodings.folder / "quarantine").glob("*"))
    freed = sum(size for _, size in leftovers) + sum(path.stat().st_size for path in quarantine)
    if dry_run:
        made = _sizes(encodings.spec, pruning)
        freed += sum(shard.path.stat().st_size for shard in pruning.old)
    else:
        made, removed = _rewrite(encodings, pruning)
        freed += removed
        for path in quarantine:
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                raise disk_error(path, error) from error
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


def _rewrite(encodings: Encodings, pruning: _Pruning) -> tuple[list[int], int]:
    """Sizes of the shards made, and bytes of those that went."""
    identities = {shard.path: file_id(shard.path.stat()) for shard in pruning.old}
    made = commit_all(encodings, pruning.entries(), shard_bytes=pruning.shard_bytes)
    before = {path: path.stat().st_size for path in made}
    return list(before.values()), sum(
        remove_file(path, identity) for path, identity in identities.items()
    )


def _sizes(spec: EncoderSpec, pruning: _Pruning) -> list[int]:
    """Sizes that new shards will have."""
    return [
        shard_size(
            spec,
            [len(entry.ids) for entry in chunk],
            sum(len(entry.text.encode()) for entry in chunk),
        )
        for chunk in chunked(pruning.entries(), pruning.shard_bytes)
    ]


def _sweep(encodings: Encodings, *, dry_run: bool) -> list[tuple[Path, int]]:
    """Leftovers with their sizes, which are known only as long as they are there."""
    sizes = {path: bytes_in([path]) for path in sweep(encodings, dry_run=True)}
    gone = sweep(encodings) if not dry_run else list(sizes)
    return [(path, sizes.get(path, 0)) for path in gone]


def bytes_in(paths: Iterable[Path]) -> int:
    """Bytes of files, and of all the files in folders."""
    files = (file for path in paths for file in (path, *path.rglob("*")))
    total = 0
    for file in files:
        try:
            total += file.stat().st_size if file.is_file() else 0
        except FileNotFoundError:
            continue
    return total
