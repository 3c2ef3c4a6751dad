"""Putting the entries of several caches into one.

Everything is looked at first: that equal names stand for equal encoders, and that each entry is
whole.  Then shards are linked where both caches lie on one disk, else copied; of a shard that has
some entries that are there already only the others are written.
"""

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from enginecast.cache.store.disk import bytes_in, disk_error, disk_errors, is_there, own_folder
from enginecast.cache.store.folders import MARK_NAME, Encodings, Store, create_store, open_store
from enginecast.cache.store.index import index_of, open_index
from enginecast.cache.store.records import read_failures, read_truncated, record
from enginecast.cache.store.shard import Shard
from enginecast.cache.store.spec import differences
from enginecast.cache.upkeep.checking import examine_all, require_tokenizer
from enginecast.cache.upkeep.rewriting import commit_all, entries_of, only_keeper
from enginecast.errors import CacheError, UsageError
from enginecast.runtime.bundle.staging import flush_folder, require_space
from enginecast.runtime.values.arrays import Array


@dataclass(frozen=True)
class Merged:
    """What came to one encoder.

    Args:
        shards: linked or copied whole; `rewritten`: those of which only a part was new.
        added, there, texts: entries that are new, that were there already, and in the end.
    """

    name: str
    shards: int
    rewritten: int
    added: int
    there: int
    texts: int


@dataclass(frozen=True)
class _Addition:
    """What is to be done for an encoder: shards to take whole, and entries of others."""

    sources: Sequence[Encodings]
    whole: Sequence[Shard]
    parts: Sequence[tuple[Shard, Array]]
    there: int


_Held = tuple[Store, list[str]]
"""A cache, and the encoders that it has."""


def merge(caches: Sequence[Path], output: Path) -> list[Merged]:
    """Merge caches into one that is new or there already; it may be among them.

    Raises:
        UsageError: no other cache than the output.
        CacheError: no cache, equal names of different encoders, a damaged shard, or shards that
            were joined meanwhile; nothing was written then.  Or another command is moving shards.
        MissingError: the disk is full; what is there by then is whole.
    """
    output = Path(os.path.realpath(output))
    stores = [store for store in map(open_store, caches) if store.root != output]
    if not stores:
        raise UsageError(f"{output}: expected another cache to merge into it, got none")
    with disk_errors(output):
        there = open_store(output) if is_there(output / MARK_NAME) else None
        # Listed once: on a network disk another listing may say otherwise.
        held = [(store, store.names()) for store in stores]
        names = sorted({name for _, found in held for name in found})
        every = [(there, there.names()), *held] if there else held
        for first, *others in (_named(every, name) for name in names):
            for other in others:
                if fields := differences(first.spec, other.spec):
                    raise CacheError(
                        f"{first.folder} and {other.folder}: made for different encoders:"
                        f" {'; '.join(fields)}",
                        hint="Rename one of the folders: a name stands for one encoder.",
                    )
        additions = [_addition(there, _named(held, name)) for name in names]
        # Refuse before work what the disk does not hold; links take no room.
        existing = next(place for place in (output, *output.parents) if is_there(place))
        device, copied = existing.stat().st_dev, []
        for one in additions:
            paths = [shard.path for shard in one.whole]
            copied += [path for path in paths if path.stat().st_dev != device]
            copied += [shard.path for shard, _ in one.parts]
        require_space(output, bytes_in(copied))
        target, merged = create_store(output), []
        for one in additions:
            first = one.sources[0]
            into = target.add(first.name, first.spec, first.about, first.read_tokenizer())
            with only_keeper(into):
                for shard in one.whole:
                    _take(shard.path, into)
                commit_all(into, entries_of(one.parts))
            for source in one.sources:
                record(into, read_failures(source))
                record(into, read_truncated(source))
            added = sum(map(len, one.whole)) + sum(len(numbers) for _, numbers in one.parts)
            texts = len(open_index(into))
            merged.append(
                Merged(into.name, len(one.whole), len(one.parts), added, one.there, texts)
            )
        return merged


def _named(held: Sequence[_Held], name: str) -> list[Encodings]:
    return [store.encodings(name) for store, names in held if name in names]


def _all_shards(encodings: Encodings) -> list[Shard]:
    """Every shard, whole; others that join them meanwhile must not hide entries."""
    before, shards = encodings.shard_paths(), []
    require_tokenizer(encodings)
    for one in examine_all(encodings):
        if one.problem is not None or one.shard is None:
            raise CacheError(
                f"{one.path}: damaged: {one.problem}; nothing was merged",
                hint=f"`enginecast cache verify {encodings.folder.parent}` removes it.",
            )
        shards.append(one.shard)
    read = {shard.path for shard in shards}
    gone = (set(before) - read) | (read - set(encodings.shard_paths()))
    if gone:
        raise CacheError(
            f"{encodings.folder}: {len(gone)} of its shards were removed meanwhile; nothing was"
            " merged",
            hint="Run the same command again.",
        )
    return shards


def _addition(there: Store | None, sources: Sequence[Encodings]) -> _Addition:
    """Go through the shards: each adds what neither the output nor one before it has."""
    shards = [shard for source in sources for shard in _all_shards(source)]
    known: list[Shard] = []
    if there and sources[0].name in there.names():
        own = there.encodings(sources[0].name)
        known += open_index(own, keep=False).require_whole().shards
    index = index_of([*known, *shards])
    whole, parts, doubles = [], [], 0
    for number, shard in enumerate(shards, len(known)):
        owners, _ = index.locations(index.find_all(shard.keys))
        fresh = np.flatnonzero(owners == number)
        doubles += len(shard) - len(fresh)
        if len(fresh) == len(shard):
            whole.append(shard)
        elif len(fresh):
            parts.append((shard, fresh))
    return _Addition(sources, whole, parts, doubles)


def _take(path: Path, into: Encodings) -> None:
    """Link a shard, or copy it where that is not possible; one of its name has the same entries."""
    target = into.shard_folder / path.name
    try:
        try:
            os.link(path, target)
        except FileExistsError:
            return
        except OSError:  # another disk, or one without links
            with own_folder(into.staging_folder) as folder:
                temporary = folder / target.name
                shutil.copyfile(path, temporary)
                with temporary.open("rb+") as file:
                    os.fsync(file.fileno())
                temporary.replace(target)
        flush_folder(target.parent)
    except OSError as error:
        raise disk_error(target, error) from error
