"""An embedding cache on disk: a folder with one folder per encoder.

CACHE/
  cache.json           format, version, id
  text_encoder_2/      a name that users choose
    spec.json          what the entries depend on, and what is known besides
    tokenizer.json
    shards/            the truth: each file is one commit, and never changes
    staging/           shards that are being written
    quarantine/        shards that were found damaged
    failed.jsonl       texts that gave no finite outputs, or were refused
    truncated.jsonl    texts that were cut to the longest
    index.safetensors  derived; may be deleted at any time
"""

import errno
import os
import re
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec
from safetensors import SafetensorError

from enginecast.cache.store.disk import disk_error, is_there, own_folder, write_flushed, write_once
from enginecast.cache.store.shard import FORMAT, SUFFIX, VERSION, Entry, shard_name, write_shard
from enginecast.cache.store.spec import About, EncoderSpec, differences, fingerprint
from enginecast.errors import CacheError, CacheVersionError
from enginecast.runtime.bundle.manifest import Record
from enginecast.runtime.bundle.staging import flush_folder

MARK_NAME = "cache.json"
SPEC_NAME = "spec.json"
TOKENIZER_NAME = "tokenizer.json"
STAGING_NAME = ".staging"
"""Of a cache: encoders that are being added."""
_TAKEN = (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR)
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}")


class Mark(msgspec.Struct):
    """What is in `cache.json`; another version may add fields."""

    format: str
    version: int
    id: str = ""


class SpecFile(Record, frozen=True, kw_only=True):
    """What is in `spec.json`."""

    fingerprint: str
    spec: EncoderSpec
    about: About


_Content = TypeVar("_Content", Mark, SpecFile)


@dataclass(frozen=True)
class Store:
    """An embedding cache.  Made by `open_store` and `create_store`."""

    root: Path
    id: str
    """Tells whether two machines see the same folder."""

    def names(self) -> list[str]:
        """The encoders that the cache has entries of."""
        found = (name for name in _names_in(self.root) if _NAME.fullmatch(name))
        return [name for name in found if is_there(self.root / name / SPEC_NAME)]

    def encodings(self, name: str | None = None) -> "Encodings":
        """The entries of the encoder of a name; None: of the only one.

        Raises:
            CacheError: there is none of that name, several to choose from, or a damaged spec.
        """
        names = self.names()
        if name is None and len(names) == 1:
            name = names[0]
        if name is None or name not in names:
            if not names:
                hint = "Run `enginecast cache fill` first."
                raise CacheError(f"{self.root}: no encoder yet", hint=hint)
            asked = f"no encoder {name!r}" if name else "several encoders; name one"
            raise CacheError(f"{self.root}: {asked}: it holds {', '.join(names)}")
        file = self.root / name / SPEC_NAME
        read = _decoded(file, SpecFile)
        if read.fingerprint != fingerprint(read.spec):
            raise CacheError(
                f"{file}: its fingerprint is not that of its spec: it was edited or damaged",
                hint="Put the original back, or fill a new cache.",
            )
        return Encodings(self.root / name, read.spec, read.about)

    def add(self, name: str, spec: EncoderSpec, about: About, tokenizer: bytes) -> "Encodings":
        """The entries of an encoder, which may be new to the cache.

        Raises:
            CacheError: the name cannot be one, or is taken by something else or by an encoder of
                another spec (says what differs); or the disk failed.
            MissingError: the disk is full.
        """
        require_name(name)
        folder = self.root / name
        if not is_there(folder / SPEC_NAME):
            try:
                # All of the folder at once; of several writers one wins.
                with own_folder(self.root / STAGING_NAME) as staging:
                    fresh = staging / folder.name
                    (fresh / "shards").mkdir(parents=True)
                    write_flushed(fresh / TOKENIZER_NAME, tokenizer)
                    content = SpecFile(fingerprint=fingerprint(spec), spec=spec, about=about)
                    encoded = msgspec.json.format(msgspec.json.encode(content))
                    write_flushed(fresh / SPEC_NAME, encoded)
                    flush_folder(fresh)
                    try:
                        fresh.rename(folder)
                    except OSError as error:
                        if error.errno not in _TAKEN:
                            raise
                flush_folder(self.root)
            except OSError as error:
                raise disk_error(folder, error) from error
            if not is_there(folder / SPEC_NAME):
                raise CacheError(
                    f"{folder}: expected the folder of an encoder, but there is no {SPEC_NAME} in"
                    " it",
                    hint="Move it away, or give this encoder another --name.",
                )
        found = self.encodings(name)
        if found.spec != spec:
            fields = "; ".join(differences(found.spec, spec))
            raise CacheError(
                f"{folder}: made for another encoder; here and asked for: {fields}",
                hint="Fill another cache, or give this encoder another --name.",
            )
        return found


class Encodings:
    """The entries of one encoder, on disk."""

    def __init__(self, folder: Path, spec: EncoderSpec, about: About) -> None:
        self.folder, self.spec, self.about = folder, spec, about
        self.name = folder.name
        self.shard_folder = folder / "shards"
        self.staging_folder = folder / "staging"
        self.tokenizer_file = folder / TOKENIZER_NAME

    def read_tokenizer(self) -> bytes:
        """The text of the encoder's `tokenizer.json`."""
        try:
            return self.tokenizer_file.read_bytes()
        except OSError as error:
            raise CacheError(
                f"{self.tokenizer_file}: {error.strerror}", hint="Put the encoder's own back."
            ) from error

    def shard_paths(self) -> list[Path]:
        """The shards committed by now, in the order of their names."""
        if not is_there(self.shard_folder):
            return []
        names = _names_in(self.shard_folder)
        return [self.shard_folder / name for name in names if name.endswith(SUFFIX)]

    def commit(self, entries: Sequence[Entry]) -> Path:
        """Write entries as one shard: all of them are there when this returns, or none."""
        target = self.shard_folder / shard_name([entry.key for entry in entries])
        try:
            self.shard_folder.mkdir(exist_ok=True)
            with own_folder(self.staging_folder) as folder:
                temporary = folder / target.name
                write_shard(temporary, self.spec, entries)
                temporary.replace(target)
                flush_folder(target.parent)
        except (OSError, SafetensorError) as error:
            raise disk_error(target, error) from error
        return target


def require_name(name: str) -> None:
    """Refuse what cannot be the name of an encoder."""
    if not _NAME.fullmatch(name):
        raise CacheError(f"--name {name}: expected letters, digits, dots, dashes, underscores")


def open_store(path: str | os.PathLike[str]) -> Store:
    """Open a cache that is there; a CacheVersionError where it is of another version."""
    root = _root(path)
    mark = root / MARK_NAME
    if not is_there(mark):
        what = f"it has no {MARK_NAME}"
        if not root.is_dir():
            what = "it is not a folder" if root.exists() else "it does not exist"
        raise CacheError(
            f"{root}: expected an embedding cache, but {what}",
            hint="`enginecast cache fill ENCODER --prompts FILE -o CACHE` makes one.",
        )
    found = _decoded(mark, Mark)
    if (found.format, found.version) != (FORMAT, VERSION):
        what = f"expected version {VERSION} of {FORMAT}, got {found.version} of {found.format}"
        hint = "Read it with the enginecast that wrote it, or fill a new cache."
        raise CacheVersionError(f"{mark}: {what}", hint=hint)
    return Store(root, found.id)


def find_store(path: str | os.PathLike[str]) -> Store | None:
    """Open a cache; None where there is nothing yet, or another process is making one right now."""
    root = _root(path)
    if is_there(root / MARK_NAME):
        return open_store(root)
    try:
        others = [name for name in os.listdir(root) if not name.startswith(f".{MARK_NAME}.")]
    except FileNotFoundError:
        return None
    except OSError as error:
        raise disk_error(root, error) from error
    if is_there(root / MARK_NAME):  # which another process has made meanwhile
        return open_store(root)
    if others:
        raise CacheError(
            f"{root}: expected an embedding cache or an empty folder, got one with {min(others)}",
            hint="Name another folder; the cache's files go into one of their own.",
        )
    return None


def create_store(path: str | os.PathLike[str]) -> Store:
    """Open a cache, or make an empty one where there is nothing."""
    root = _root(path)
    if find_store(root) is None:
        mark = Mark(format=FORMAT, version=VERSION, id=uuid.uuid4().hex)
        try:
            root.mkdir(parents=True, exist_ok=True)
            write_once(root / MARK_NAME, msgspec.json.encode(mark))
            flush_folder(root.parent)
        except OSError as error:
            raise disk_error(root / MARK_NAME, error) from error
    return open_store(root)


def _root(path: str | os.PathLike[str]) -> Path:
    """The path without links; of links in a circle, which `Path.resolve` does not take, one."""
    return Path(os.path.realpath(path))


def _names_in(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError as error:
        raise disk_error(folder, error) from error


def _decoded(file: Path, kind: type[_Content]) -> _Content:
    try:
        return msgspec.json.decode(file.read_bytes(), type=kind)
    except OSError as error:
        raise disk_error(file, error) from error
    except msgspec.MsgspecError as error:
        raise CacheError(f"{file}: {error}") from error
