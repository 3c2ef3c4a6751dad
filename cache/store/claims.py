"""Who does which chunk, so that several fills share the work, and what killed writers leave behind.

A claim saves work and guards nothing: two writers of one chunk write the same entries, and the
later shard replaces the earlier.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from enginecast.cache.store.disk import disk_error, is_there, remove_abandoned, try_lock
from enginecast.cache.store.folders import STAGING_NAME, Encodings

FOLDER = "claims"


@contextmanager
def claim(encodings: Encodings, chunk_name: str) -> Iterator[bool]:
    """Take on a chunk (`schedule.Chunk`) until the end of the block, or of the process.

    Yields:
        False while another live writer has it.  True where the disk has no locks.
    """
    path = encodings.staging_folder / FOLDER / f"{chunk_name}.lock"
    descriptor, free = _taken(path)
    try:
        yield free
    finally:
        if descriptor is not None:
            if free:
                with suppress(OSError):  # `sweep` takes what is left
                    path.unlink(missing_ok=True)  # while it is ours: nobody else's goes
            os.close(descriptor)


def _taken(path: Path) -> tuple[int | None, bool]:
    """The open file of a claim, if one is available, and whether the chunk is ours."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        while True:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
            if try_lock(descriptor) is False:
                return descriptor, False
            is_ours = False
            try:
                with suppress(FileNotFoundError):  # its owner removed it before it was locked
                    is_ours = os.path.samestat(path.stat(), os.fstat(descriptor))
            finally:
                if not is_ours:
                    os.close(descriptor)
            if is_ours:
                return descriptor, True
    except OSError:  # the folder cannot be written: what fails is the commit, and says why
        return None, True


def sweep(encodings: Encodings, *, dry_run: bool = False) -> list[Path]:
    """Remove what dead writers were writing, or only list it (`dry_run`): folders and files."""
    staging = encodings.staging_folder
    candidates = [
        *_inside(encodings.folder.parent / STAGING_NAME),
        *(path for path in _inside(staging) if path.name != FOLDER),
        *_inside(staging / FOLDER),
    ]
    return [path for path in candidates if remove_abandoned(path, dry_run=dry_run)]


def _inside(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir()) if is_there(folder) else []
    except OSError as error:
        raise disk_error(folder, error) from error
