"""Writing a cache's files so that they outlast a crash; locks; what is said when the disk refuses.

A killed process lets go of its locks.  `flock` works between machines, too, on disks that support
it.  Where none does, nobody waits and nothing fails: two writers then do the same work, and their
shards replace one another.
"""

import errno
import fcntl
import os
import re
import shutil
import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from enginecast.errors import CacheError, MissingError
from enginecast.runtime.bundle.staging import flush_folder

_ABANDONED_SECONDS = 24 * 3600
"""Age from which a folder is taken for abandoned where the file system has no locks."""
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)


def write_flushed(path: Path, data: bytes) -> None:
    """Write a file and flush it; after an OSError a part of it may be there."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def write_once(path: Path, data: bytes) -> None:
    """Write a file unless somebody else has: one of several writers wins, nobody sees a part."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        write_flushed(temporary, data)
        try:
            os.link(temporary, path)
        except FileExistsError:
            pass
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            if not path.exists():  # the last of several writers wins, within these two lines
                temporary.replace(path)
    finally:
        with suppress(OSError):  # must not hide what went wrong
            temporary.unlink(missing_ok=True)
    flush_folder(path.parent)


def is_there(path: Path) -> bool:
    """Whether there is a file or folder of that name; a CacheError where nobody can tell."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise disk_error(path, error) from error
    return True


def disk_error(path: Path, error: Exception) -> CacheError | MissingError:
    """What to raise for an error of the disk; safetensors has its own for what is an OSError."""
    number = getattr(error, "errno", None)
    described = re.search(r"os error (\d+)", str(error))
    if number is None and described:
        number = int(described[1])
    if number in _NO_SPACE:
        return MissingError(
            f"{path.parent}: the disk is full; what was committed before is safe",
            hint="Free some space and run the same command again.",
        )
    return CacheError(f"{path}: {os.strerror(number) if number else error}")


@contextmanager
def disk_errors(folder: Path) -> Iterator[None]:
    """Give errors of the disk the name of the file, or else that of the folder worked on."""
    try:
        yield
    except OSError as error:
        raise disk_error(Path(error.filename or folder), error) from error


def try_lock(descriptor: int) -> bool | None:
    """Lock an open file or folder until it is closed: whether it is ours; None: no locks here."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def bytes_in(paths: Iterable[Path]) -> int:
    """Bytes of files, and of all the files in folders; others may remove some meanwhile."""
    total = 0
    for path in paths:
        inside = (Path(folder, name) for folder, _, names in os.walk(path) for name in names)
        for file in inside if path.is_dir() else (path,):
            with suppress(FileNotFoundError):
                total += file.stat().st_size
    return total


@contextmanager
def own_folder(parent: Path) -> Iterator[Path]:
    """A new folder that is removed at the end, and by `remove_abandoned` should we be killed."""
    parent.mkdir(exist_ok=True)
    while True:  # a sweep may take it before it is locked: then another one
        folder = parent / uuid.uuid4().hex
        folder.mkdir()
        try:
            descriptor = os.open(folder, os.O_RDONLY)
        except FileNotFoundError:
            continue
        try:
            if try_lock(descriptor) is not False and is_there(folder):
                try:
                    yield folder
                finally:
                    shutil.rmtree(folder, ignore_errors=True)
                return
        finally:
            os.close(descriptor)


def remove_abandoned(path: Path, *, dry_run: bool = False) -> bool:
    """Remove a folder or file whose owner is dead; whether it was removed, or would be."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:  # somebody else removed it
        return False
    try:
        free = try_lock(descriptor)
        if free is None:
            free = time.time() - os.fstat(descriptor).st_mtime > _ABANDONED_SECONDS
        with disk_errors(path):
            if free and not dry_run and path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            elif free and not dry_run:
                path.unlink(missing_ok=True)
        return free
    finally:
        os.close(descriptor)
