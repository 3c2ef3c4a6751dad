"""Find and clean up what killed exports left next to bundles."""

import os
import re
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from enginecast.errors import BundleError
from enginecast.runtime.bundle.directory import resolved
from enginecast.runtime.bundle.staging import ABANDONED_SECONDS, lock

_NAME = re.compile(r"\.(?P<name>.+)\.(?P<kind>tmp|old)-[0-9a-f]{32}")

Kind = Literal["unfinished", "put aside"]


@dataclass(frozen=True)
class Leftover:
    """A folder or file that a process created next to a bundle and did not remove."""

    path: Path
    target: Path
    """The bundle that it was to become, or was."""
    kind: Kind
    """ "unfinished": what was being written; "put aside": the old bundle, while a new one took its
    name on a file system that cannot exchange names."""
    bytes: int
    seconds: float
    """Seconds since the last change."""
    in_use: bool
    """Whether its process is alive, or may just have created it."""

    @property
    def action(self) -> Literal["none", "remove", "restore"]:
        """The action of `clean`, in words."""
        if self.in_use:
            return "none"
        if self.kind == "put aside" and not os.path.lexists(self.target):
            return "restore"
        return "remove"


def find_leftovers(folder: str | os.PathLike[str]) -> tuple[Leftover, ...]:
    """Find leftovers in a folder of bundles, or next to a bundle."""
    place = resolved(folder)
    try:
        names = sorted(os.listdir(place))
    except OSError as error:
        raise BundleError(f"{place}: {error.strerror}") from error
    found = (_leftover(place / name) for name in names)
    left = [one for one in found if one is not None]
    # Of several that were the same bundle, the newest gets its name back.
    return tuple(sorted(left, key=lambda one: (one.target, one.seconds)))


def clean(leftover: Leftover) -> bool:
    """Remove a leftover, or restore an old bundle, unless it is in use; whether that was done."""
    if leftover.action == "none" or not leftover.path.exists():
        return False
    held = lock(leftover.path)
    if held is None:
        return False
    try:
        if leftover.action == "restore":
            leftover.path.rename(leftover.target)
        elif leftover.path.is_dir():
            shutil.rmtree(leftover.path)
        else:
            leftover.path.unlink()
    except OSError as error:
        raise BundleError(f"{leftover.path}: {error.strerror}") from error
    finally:
        os.close(held)
    return True


def _leftover(path: Path) -> Leftover | None:
    match = _NAME.fullmatch(path.name)
    if match is None or path.is_symlink() or not (path.is_dir() or path.is_file()):
        return None  # nothing that an exporter makes; opening a pipe would wait for its writer
    try:
        files = [path, *(file for file in path.rglob("*") if file.is_file())]
        sizes = sum(file.stat().st_size for file in files if file.is_file())
        age = max(0.0, time.time() - max(file.stat().st_mtime for file in files))
        held = lock(path)
    except OSError:  # its owner is done with it
        return None
    if held is not None:
        os.close(held)
    kind: Kind = "put aside" if match["kind"] == "old" else "unfinished"
    # An exporter locks its folder before it writes into it; between two renames it has no lock.
    may_live = kind == "put aside" or path.is_file() or len(files) == 1
    if kind == "put aside":
        age = max(0.0, time.time() - path.stat().st_ctime)
    in_use = held is None or (may_live and age < ABANDONED_SECONDS)
    return Leftover(path, path.with_name(match["name"]), kind, sizes, age, in_use)
