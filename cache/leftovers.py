"""What killed writers leave behind."""

from pathlib import Path

from enginecast.cache.claims import FOLDER
from enginecast.cache.locks import remove_abandoned
from enginecast.cache.store import STAGING_NAME, Encodings


def sweep(encodings: Encodings, *, dry_run: bool = False) -> list[Path]:
    """Remove what dead writers were writing.  Those at work are left alone.

    Args:
        dry_run: only say what would be removed.

    Returns:
        The folders and files that were there.
    """
    staging = encodings.staging_folder
    candidates = [
        *_inside(encodings.folder.parent / STAGING_NAME),
        *(path for path in _inside(staging) if path.name != FOLDER),
        *_inside(staging / FOLDER),
    ]
    return [path for path in candidates if remove_abandoned(path, dry_run=dry_run)]


def _inside(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []
