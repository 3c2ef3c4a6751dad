"""Do something again whenever a file changes."""

import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

POLL = 0.2
"""Seconds between two looks at the files."""
Stamps = Mapping[Path, tuple[int, int] | None]


def watch(
    run: Callable[[], Iterable[Path]], known: Iterable[Path] = (), poll: float = POLL
) -> None:
    """Call `run` now, and again after each change of a file that it returns; Ctrl-C ends it.

    A file that is gone for a moment, as while an editor saves it, is waited for.

    Args:
        known: files whose changes during the first call count, too.
    """
    try:
        files = set(known)
        while True:
            before = stamps(files)
            files |= set(run())
            before = {**stamps(files), **before}  # an edit during the run counts
            while stamps(files) == before:
                time.sleep(poll)
            _settle(files, poll)
    except KeyboardInterrupt:
        return


def stamps(files: Iterable[Path]) -> Stamps:
    """When each file was changed, and its size; None where it is not there."""
    return {file: _stamp(file) for file in files}


def _settle(files: set[Path], poll: float) -> None:
    """Wait until all files are there and none changes any more."""
    before: Stamps = {}
    while (now := stamps(files)) != before or None in now.values():
        before = now
        time.sleep(poll / 2)


def _stamp(file: Path) -> tuple[int, int] | None:
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size
