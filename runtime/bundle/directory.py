"""A folder that is opened only once, so that the files that were checked are the files that are
used.

Between the check of a bundle and its use another process may publish a new one under the name, or
swap a file.  The folder is therefore held open: what is read through its descriptor stays the same
bundle, whatever its name stands for by then.  A file that was swapped or written to within it
shows in its inode or its ctime, which nobody can set back.
"""

import hashlib
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import NamedTuple

from enginecast.errors import BundleError, shortened


class State(NamedTuple):
    """File attributes that change if a file is replaced or written to."""

    device: int
    inode: int
    size: int
    mtime: int
    ctime: int


class Directory:
    """A folder that stays open while this object lives."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        # `close` is bound here: when the interpreter ends, `os` may be gone before this object.
        if (descriptor := getattr(self, "_descriptor", None)) is not None:
            close(descriptor)

    def __reduce__(self) -> tuple[type["Directory"], tuple[Path]]:
        return Directory, (self.root,)  # a copy has a descriptor of its own

    @property
    def path(self) -> Path:
        """A path to the same folder, whatever happens to its name; where the system has no such
        paths, its name.  It is good for as long as this object lives.
        """
        return Path(f"/proc/self/fd/{self._descriptor}") if _has_paths() else self.root

    def entries(self) -> dict[str, os.stat_result]:
        """The folder's entries, links not followed."""
        with os.scandir(self._descriptor) as entries:
            return {entry.name: entry.stat(follow_symlinks=False) for entry in entries}

    def open(self, name: str) -> int:
        """Open a plain file of the folder, no link, for reading; whoever asks closes it."""
        # Nobody waits for a pipe's other end.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        descriptor = os.open(name, flags, dir_fd=self._descriptor)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise BundleError(f"{self.root / name}: expected a plain file")
        return descriptor

    @contextmanager
    def opened(self, name: str, expected: State | None) -> Iterator[Path]:
        """A path to a file, which is the same file while it is open, and of the expected state."""
        with open(self.open(name), "rb", buffering=0) as file:
            if expected is not None and _state(os.fstat(file.fileno())) != expected:
                raise changed(self.root, name)
            yield Path(f"/proc/self/fd/{file.fileno()}") if _has_paths() else self.root / name

    def read(self, name: str, most: int) -> bytes:
        """The first bytes of a file."""
        with open(self.open(name), "rb") as file:
            return file.read(most)

    def digest(self, name: str) -> tuple[str, State]:
        """The sha256 of a file in hexadecimal, and its state before it was read."""
        with open(self.open(name), "rb", buffering=0) as file:
            state = _state(os.fstat(file.fileno()))
            return hashlib.file_digest(file, "sha256").hexdigest(), state

    def state(self, name: str) -> State:
        """The state of a file, links not followed."""
        return _state(os.stat(name, dir_fd=self._descriptor, follow_symlinks=False))


def resolved(path: str | os.PathLike[str]) -> Path:
    """An absolute path without links; a BundleError where no file can have it."""
    try:
        return Path(path).resolve()
    except (OSError, RuntimeError, ValueError) as error:  # too long; links in a circle; a NUL
        reason = (isinstance(error, OSError) and error.strerror) or error
        shown = shortened(os.fsdecode(path))
        raise BundleError(f"{shown!r}: expected the path of a folder: {reason}") from error


@contextmanager
def descriptor_of(
    path: str | os.PathLike[str], flags: int = os.O_RDONLY, mode: int = 0o644
) -> Iterator[int]:
    """A file or folder that is open within the block."""
    descriptor = os.open(path, flags, mode)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def changed(root: Path, name: str) -> BundleError:
    """The error for a file that was replaced."""
    return BundleError(
        f"{root}: {name} was changed while the bundle was being opened",
        hint="Publish with enginecast, which never writes into a bundle, and load it again.",
    )


def _state(found: os.stat_result) -> State:
    return State(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


@cache
def _has_paths() -> bool:
    """Whether the system has paths for descriptors (Linux)."""
    return os.path.isdir("/proc/self/fd")
