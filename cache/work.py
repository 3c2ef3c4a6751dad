"""The work of a fill, cut into chunks that are encoded and committed one by one."""

from dataclasses import dataclass

from enginecast.runtime.arrays import Array


@dataclass(frozen=True)
class Wanted:
    """A text whose outputs are wanted.

    Args:
        key: see `keys.Keys`.
        text: as the user gave it.
        ids: int32 [tokens], without padding.
    """

    key: bytes
    text: str
    ids: Array


@dataclass(frozen=True)
class Chunk:
    """Texts that make one shard: what a worker takes on, and what is done again when it dies.

    Args:
        name: the same for the same texts, whoever cuts them into chunks: what a worker claims.
        wanted: no key twice, in the order of their lengths.
    """

    name: str
    wanted: tuple[Wanted, ...]


@dataclass(frozen=True)
class Failure:
    """A text that was not stored, and why.

    Args:
        key: what it would have been stored under.
    """

    text: str
    tokens: int
    reason: str
    key: bytes


@dataclass(frozen=True)
class Truncation:
    """A text that was cut to the longest.

    Args:
        tokens: before it was cut.
        key: of the entry that stands for it.
    """

    text: str
    tokens: int
    key: bytes


@dataclass(frozen=True)
class Done:
    """What became of a chunk.

    Args:
        shards: names of the files that were committed; more than one where a chunk took long.
        texts: how many were stored; those that were there already are not counted.
        tokens: of those texts.
        bytes: of the shards.
        failures: see `records.record_failures`.
    """

    shards: tuple[str, ...] = ()
    texts: int = 0
    tokens: int = 0
    bytes: int = 0
    failures: tuple[Failure, ...] = ()
