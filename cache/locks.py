"""Locks that a killed process lets go of, and folders that are known by them to be in use.

`flock` works between machines, too, on disks that support it.  Where none does, nobody waits and
nothing fails: two writers then do the same work, and their shards replace one another.
"""

import fcntl
import os
import shutil
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_ABANDONED_SECONDS = 24 * 3600
"""Age from which a folder is taken for abandoned where there are no locks to tell."""


def try_lock(descriptor: int) -> bool | None:
    """Lock an open file or folder until its descriptor is closed.

    Returns:
        Whether it is ours now; None: its file system has no locks.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


@contextmanager
def own_folder(parent: Path) -> Iterator[Path]:
    """A new folder that is removed at the end, and by `remove_abandoned` should we be killed.

    Raises:
        OSError: the disk failed.
    """
    parent.mkdir(exist_ok=True)
    folder, descriptor = _made(parent)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(descriptor)


def _made(parent: Path) -> tuple[Path, int]:
    """A folder and its lock.  A sweep may take it before it is locked: then another one."""
    while True:
        folder = parent / uuid.uuid4().hex
        folder.mkdir()
        try:
            descriptor = os.open(folder, os.O_RDONLY)
        except FileNotFoundError:
            continue
        if try_lock(descriptor) is not False and folder.exists():
            return folder, descriptor
        os.close(descriptor)


def remove_abandoned(path: Path, *, dry_run: bool = False) -> bool:
    """Remove a folder or file whose owner is dead.

    Returns:
        Whether it was removed, or would be.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:  # somebody else removed it
        return False
    try:
        free = try_lock(descriptor)
        if free is None:
            free = time.time() - os.fstat(descriptor).st_mtime > _ABANDONED_SECONDS
        if free and not dry_run:
            _remove(path)
        return free
    finally:
        os.close(descriptor)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
