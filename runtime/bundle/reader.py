"""Reading a bundle from disk: all its files are there, nothing else is, and no byte has changed.

No weight format notices damage by itself (flipped bits in a safetensors file load without an
error), so digests are checked before any other library opens a file.
"""

import hashlib
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from enginecast.errors import BundleError
from enginecast.runtime.bundle.manifest import (
    MANIFEST_NAME,
    MAX_MANIFEST_BYTES,
    FileRecord,
    Manifest,
)
from enginecast.runtime.bundle.manifest_json import decode

Check = Literal["full", "size"]


@dataclass(frozen=True)
class Bundle:
    """A bundle whose files agree with its manifest."""

    root: Path
    manifest: Manifest

    def path(self, name: str) -> Path:
        """The path of a file of this bundle.

        Raises:
            BundleError: the manifest lists no such file.
        """
        if all(file.name != name for file in self.manifest.files):
            raise BundleError(f"{self.root}: the bundle holds no {name}")
        return self.root / name


def open_bundle(path: str | os.PathLike[str], *, check: Check = "full") -> Bundle:
    """Open a bundle and check its files.

    Args:
        path: the folder; it may be a link, nothing inside it may.
        check: "full" compares sizes and sha256 digests; "size" leaves the digests out, and so
            does not notice damage that keeps a file's length.

    Raises:
        BundleError: naming every file that is missing, extra, damaged, or not a plain file.
    """
    root = Path(path).resolve()
    data = _read_manifest(root)
    try:
        manifest = decode(data)
    except BundleError as error:  # a pipeline holds several
        raise BundleError(f"{root}/{error.message}", hint=error.hint) from error
    problems = list(_listing_problems(root, manifest.files))
    if not problems and check == "full":
        problems = list(_digest_problems(root, manifest.files))
    if problems:
        raise BundleError(
            f"{root}: the files do not agree with {MANIFEST_NAME}: {'; '.join(problems)}",
            hint="It was damaged or edited after it was published: copy or export it again.",
        )
    return Bundle(root, manifest)


def digest(path: str | os.PathLike[str]) -> str:
    """The sha256 of a file, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _read_manifest(root: Path) -> bytes:
    if not root.is_dir():
        what = "is not a folder" if root.exists() else "does not exist"
        raise BundleError(f"{root}: expected the folder of a bundle, but it {what}")
    path = root / MANIFEST_NAME
    if path.is_symlink() or not path.is_file():
        raise BundleError(
            f"{root}: expected a bundle, but there is no plain file {MANIFEST_NAME} in it",
            hint="`enginecast export MODEL -o DIR` makes a bundle.",
        )
    try:
        with path.open("rb") as file:
            return file.read(MAX_MANIFEST_BYTES + 1)
    except OSError as error:
        raise BundleError(f"{path}: {error.strerror}") from error


def _listing_problems(root: Path, files: tuple[FileRecord, ...]) -> Iterator[str]:
    with os.scandir(root) as entries:
        present = {entry.name: entry.stat(follow_symlinks=False) for entry in entries}
    present.pop(MANIFEST_NAME, None)
    expected = {file.name for file in files}
    for name in sorted(present.keys() - expected):
        yield f"{name!r} is not listed"
    for file in files:
        status = present.get(file.name)
        if status is None:
            yield f"{file.name} is missing"
        elif not stat.S_ISREG(status.st_mode):
            yield f"{file.name} is a {_kind(status.st_mode)}, expected a plain file"
        elif status.st_size != file.size:
            yield f"{file.name} has {status.st_size} bytes, expected {file.size}"


def _digest_problems(root: Path, files: tuple[FileRecord, ...]) -> Iterator[str]:
    for file in files:
        try:
            actual = digest(root / file.name)
        except OSError as error:
            yield f"{file.name} cannot be read ({error.strerror})"
            continue
        if actual != file.sha256:
            yield f"{file.name} has sha256 {actual}, expected {file.sha256}"


def _kind(mode: int) -> str:
    if stat.S_ISLNK(mode):
        return "symbolic link"
    return "folder" if stat.S_ISDIR(mode) else "special file"
