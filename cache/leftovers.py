"""What killed writers leave behind."""

from pathlib import Path

from enginecast.cache.claims import FOLDER
from enginecast.cache.disk import disk_error, is_there
from enginecast.cache.locks import remove_abandoned
from enginecast.cache.store import STAGING_NAME, Encodings


def sweep(encodings: Encodings, *, dry_run: bool = False) -> list[Path]:
    """Remove what dead writers were writing.  Those at work are left alone.

    Args:
        dry_run: only say what would be removed.

    Returns:
        The folders and files that were there.

    Raises:
        CacheError: where they are cannot be read.
    """
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
