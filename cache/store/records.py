"""What went wrong with texts, kept beside the entries as JSON lines.

Several writers may add lines at once.  A line that a killed writer left unfinished is skipped:
its text is not stored either, so that the next fill comes upon it again.
"""

import fcntl
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from enginecast.cache.store.disk import disk_error
from enginecast.cache.store.folders import Encodings
from enginecast.cache.store.index import Index, open_index
from enginecast.runtime.bundle.directory import descriptor_of


@dataclass(frozen=True)
class Failure:
    """A text that was not stored, why, and the key that it would have had."""

    text: str
    tokens: int
    reason: str
    key: bytes


@dataclass(frozen=True)
class Truncation:
    """A text that was cut: its tokens before that, and the key of the entry that stands for it."""

    text: str
    tokens: int
    key: bytes


_Record = TypeVar("_Record", Failure, Truncation)


FILES: Mapping[type[Failure | Truncation], str] = {
    Failure: "failed.jsonl",
    Truncation: "truncated.jsonl",
}


def record(encodings: Encodings, records: Sequence[_Record]) -> None:
    """Note texts that were not stored, or cut; those that are noted already are left out."""
    if not records:
        return
    kind = type(records[0])
    path = encodings.folder / FILES[kind]
    try:
        with descriptor_of(path, os.O_RDWR | os.O_CREAT | os.O_APPEND) as descriptor:
            with suppress(OSError):  # a disk without locks: a line may then be there twice
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            known = set(_read(encodings, kind))
            fresh = [one for one in dict.fromkeys(records) if one not in known]
            lines = b"".join(msgspec.json.encode(one) + b"\n" for one in fresh)
            size = os.fstat(descriptor).st_size
            if size and os.pread(descriptor, 1, size - 1) != b"\n":
                lines = b"\n" + lines
            try:
                while lines:
                    lines = lines[os.write(descriptor, lines) :]
                os.fsync(descriptor)
            except OSError:  # all of the lines, or none
                os.ftruncate(descriptor, size)
                raise
    except OSError as error:
        raise disk_error(path, error) from error


def read_failures(encodings: Encodings, index: Index | None = None) -> list[Failure]:
    """The texts that failed and are not in the index (None: of now); of a text the last failure."""
    found = {one.key: one for one in _read(encodings, Failure)}
    if not found:
        return []
    keyed = list(found)
    at = (open_index(encodings) if index is None else index).find_all(keyed)
    stored = {key for key, position in zip(keyed, at, strict=True) if position >= 0}
    return [one for one in found.values() if one.key not in stored]


def read_truncated(encodings: Encodings) -> list[Truncation]:
    """The texts that were cut, each once."""
    return list(dict.fromkeys(_read(encodings, Truncation)))


def _read(encodings: Encodings, kind: type[_Record]) -> Iterator[_Record]:
    path = encodings.folder / FILES[kind]
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return
    except OSError as error:
        raise disk_error(path, error) from error
    decoder = msgspec.json.Decoder(kind)
    for line in content.splitlines():
        with suppress(msgspec.MsgspecError):
            yield decoder.decode(line)
