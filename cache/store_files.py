"""The files that say what a cache is: `cache.json`, and `spec.json` of each encoder."""

import hashlib
from pathlib import Path
from typing import Any

import msgspec

from enginecast.cache.disk import disk_error
from enginecast.cache.shard_format import FORMAT, VERSION
from enginecast.cache.spec import About, EncoderSpec, fingerprint
from enginecast.errors import CacheError, CacheVersionError
from enginecast.runtime.manifest import Record

_OTHER_VERSION = "Read it with the enginecast that wrote it, or fill a new cache."


class Mark(Record, frozen=True, kw_only=True):
    """What is in `cache.json`."""

    format: str
    version: int
    id: str


class SpecFile(Record, frozen=True, kw_only=True):
    """What is in `spec.json`."""

    fingerprint: str
    spec: EncoderSpec
    about: About


class _AnyMark(msgspec.Struct):
    """What `cache.json` has in every version, besides other fields."""

    format: str
    version: int


def read_mark(file: Path) -> Mark:
    """Read a cache's `cache.json`.

    Raises:
        CacheVersionError: of another version.
        CacheError: it cannot be read.
    """
    try:
        data = file.read_bytes()
        found = msgspec.json.decode(data, type=_AnyMark)
        if (found.format, found.version) == (FORMAT, VERSION):
            return msgspec.json.decode(data, type=Mark)
    except OSError as error:
        raise disk_error(file, error) from error
    except msgspec.MsgspecError as error:
        raise CacheError(f"{file}: {error}") from error
    raise CacheVersionError(
        f"{file}: expected version {VERSION} of {FORMAT}, got {found.version} of {found.format}",
        hint=_OTHER_VERSION,
    )


def encode_spec(spec: EncoderSpec, about: About) -> bytes:
    """The content of a `spec.json`."""
    made = SpecFile(fingerprint=fingerprint(spec), spec=spec, about=about)
    return msgspec.json.format(msgspec.json.encode(made))


def read_spec(file: Path) -> SpecFile:
    """Read an encoder's `spec.json`.

    Raises:
        CacheVersionError: it is as it was written, but not by this version.
        CacheError: it cannot be read, or was edited or damaged.
    """
    try:
        data = file.read_bytes()
    except OSError as error:
        raise disk_error(file, error) from error
    try:
        read = msgspec.json.decode(data, type=SpecFile)
    except msgspec.MsgspecError as error:
        if _is_as_written(data):
            raise CacheVersionError(
                f"{file}: another version wrote it: {error}", hint=_OTHER_VERSION
            ) from error
        raise CacheError(f"{file}: {error}") from error
    if read.fingerprint != fingerprint(read.spec):
        raise CacheError(
            f"{file}: its fingerprint is not that of its spec: it was edited or damaged",
            hint="Put the original back, or fill a new cache.",
        )
    return read


def _is_as_written(data: bytes) -> bool:
    """Whether the fingerprint is that of the spec, whatever fields that has.

    Files have the fields in the order in which `fingerprint` hashes them; dictionaries it sorts.
    """
    try:
        read: dict[str, Any] = msgspec.json.decode(data)
        spec = {
            name: dict(sorted(value.items())) if isinstance(value, dict) else value
            for name, value in read["spec"].items()
        }
        found = hashlib.blake2b(msgspec.json.encode(spec), digest_size=16).hexdigest()
        return bool(read["fingerprint"] == found)
    except (AttributeError, LookupError, TypeError, ValueError):
        return False
