"""The bundles that the user trusts on this machine, by the digest of their manifest.

A file of the user alone: ~/.config/enginecast/trusted.json ($XDG_CONFIG_HOME).  The manifest has
the digests of all files, so one digest stands for every byte of a bundle; whoever changes one has
another bundle, which is not trusted.
"""

import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import msgspec

from enginecast.errors import BundleError
from enginecast.runtime.bundle.directory import descriptor_of
from enginecast.runtime.bundle.manifest import Digest, Record
from enginecast.runtime.bundle.reader import Bundle
from enginecast.runtime.bundle.staging import write_file

_LARGEST = 16 << 20


class Trusted(Record, frozen=True, kw_only=True):
    """A bundle that was trusted."""

    sha256: Digest
    """Digest of its manifest."""
    folder: str
    """Its folder when it was trusted."""


class _Store(Record, frozen=True, kw_only=True):
    schema_version: int = 1
    bundles: tuple[Trusted, ...] = ()


def store_path() -> Path:
    """The path of the list; a BundleError where the user has no home."""
    home = os.environ.get("XDG_CONFIG_HOME", "")
    if not os.path.isabs(home):  # as its specification has it; another folder, another list
        home = os.path.expanduser("~/.config")
    if not os.path.isabs(home):
        raise BundleError(
            "trusted.json: expected a home folder for it, but this user has none",
            hint="Set HOME or XDG_CONFIG_HOME.",
        )
    return Path(home) / "enginecast" / "trusted.json"


def trusted() -> tuple[Trusted, ...]:
    """The bundles that are trusted here; a BundleError where others can write to the list."""
    try:
        path = store_path()
    except BundleError:  # without a home there is no list
        return ()
    try:
        with path.open("rb") as file:
            status, folder = os.fstat(file.fileno()), path.parent.stat()
            data = file.read(_LARGEST)
    except (FileNotFoundError, NotADirectoryError):
        return ()
    except OSError as error:
        raise BundleError(f"{path}: {error.strerror}") from error
    _require_own(path, status, "file", "600")
    _require_own(path.parent, folder, "folder", "700")
    try:
        return msgspec.json.decode(data, type=_Store).bundles
    except (msgspec.MsgspecError, RecursionError) as error:
        raise BundleError(f"{path}: {error}") from error


def _require_own(path: Path, status: os.stat_result, kind: str, mode: str) -> None:
    """Refuse what others can write to: write access to a folder allows replacing its files."""
    if status.st_uid not in (os.geteuid(), 0) or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise BundleError(
            f"{path}: expected a {kind} that its user alone can write to, got mode"
            f" {stat.S_IMODE(status.st_mode):o} and owner {status.st_uid}",
            hint=f"chmod {mode} {path}, once you have seen that nobody changed it.",
        )


def is_trusted(bundle: Bundle) -> bool:
    """Whether a bundle is on the list."""
    return any(one.sha256 == bundle.sha256 for one in trusted())


def trust(bundle: Bundle) -> None:
    """Put a bundle, whose digests were checked, on the list."""
    with _alone():
        others = [one for one in trusted() if one.sha256 != bundle.sha256]
        _write((*others, Trusted(sha256=bundle.sha256, folder=str(bundle.root))))


def distrust(sha256: str) -> bool:
    """Remove a bundle from the list; return whether it was there."""
    with _alone():
        before = trusted()
        after = tuple(one for one in before if one.sha256 != sha256)
        if len(after) != len(before):
            _write(after)
    return len(after) != len(before)


@contextmanager
def _alone() -> Iterator[None]:
    """Lock the list within the block: concurrent changes would be lost."""
    folder = store_path().parent
    with ExitStack() as held:
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = held.enter_context(descriptor_of(folder))
        except OSError as error:
            raise BundleError(f"{folder}: {error.strerror}") from error
        with suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield


def _write(bundles: tuple[Trusted, ...]) -> None:
    path = store_path()
    data = msgspec.json.format(msgspec.json.encode(_Store(bundles=bundles)), indent=1)
    write_file(path, data + b"\n", mode=0o600)
