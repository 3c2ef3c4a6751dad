"""Reading a bundle from disk: all its files are there, nothing else is, and no byte has changed.

No weight format notices damage by itself (flipped bits in a safetensors file load without an
error), so digests are checked before any other library opens a file.
"""

import hashlib
import os
import stat
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
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

LARGE = 16 << 20
"""Bytes from which a file of weights may be read beside other work: below, a thread is not worth
it."""


@dataclass(frozen=True)
class Bundle:
    """A bundle whose files agree with its manifest."""

    root: Path
    manifest: Manifest
    _left: "Future[list[str]] | None" = field(default=None, repr=False, compare=False)
    """Problems of files whose digests are computed meanwhile."""

    def require_whole(self) -> None:
        """Wait for digests that are computed beside other work.

        Raises:
            BundleError: naming every file that is damaged.
        """
        if self._left is not None and (problems := self._left.result()):
            raise _disagrees(self.root, problems)

    def path(self, name: str) -> Path:
        """The path of a file of this bundle.

        Raises:
            BundleError: the manifest lists no such file.
        """
        if all(file.name != name for file in self.manifest.files):
            raise BundleError(f"{self.root}: the bundle holds no {name}")
        return self.root / name


def open_bundle(
    path: str | os.PathLike[str], *, check: Check = "full", beside: bool = False
) -> Bundle:
    """Open a bundle and check its files.

    Args:
        path: the folder; it may be a link, nothing inside it may.
        check: "full" compares sizes and sha256 digests; "size" leaves the digests out, and so
            does not notice damage that keeps a file's length.
        beside: large files of weights are read while the caller goes on, who calls
            `Bundle.require_whole` before anything comes of them.

    Raises:
        BundleError: naming every file that is missing, extra, damaged, or not a plain file.
    """
    root = Path(path).resolve()
    data = _read_manifest(root)
    try:
        manifest = decode(data)
    except BundleError as error:  # a pipeline holds several
        raise BundleError(f"{root}/{error.message}", hint=error.hint) from error
    if problems := list(_listing_problems(root, manifest.files)):
        raise _disagrees(root, problems)
    if check == "size":
        return Bundle(root, manifest)
    engines = {engine.file for engine in manifest.engines}
    weights = [f for f in manifest.files if f.size >= LARGE and f.name not in engines]
    left = _begun(root, weights) if beside and weights else None
    others = [f for f in manifest.files if left is None or f not in weights]
    if problems := _digest_problems(root, others):
        raise _disagrees(root, [*problems, *(left.result() if left else ())])
    return Bundle(root, manifest, left)


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


def _begun(root: Path, files: Sequence[FileRecord]) -> "Future[list[str]]":
    """Check digests in a thread of their own, which leaves the interpreter to others."""
    reader = ThreadPoolExecutor(1, thread_name_prefix="digests")
    try:
        return reader.submit(_digest_problems, root, files)
    finally:
        reader.shutdown(wait=False)


def _digest_problems(root: Path, files: Sequence[FileRecord]) -> list[str]:
    problems = []
    for file in files:
        try:
            actual = digest(root / file.name)
        except OSError as error:
            problems.append(f"{file.name} cannot be read ({error.strerror})")
            continue
        if actual != file.sha256:
            problems.append(f"{file.name} has sha256 {actual}, expected {file.sha256}")
    return problems


def _disagrees(root: Path, problems: Sequence[str]) -> BundleError:
    return BundleError(
        f"{root}: the files do not agree with {MANIFEST_NAME}: {'; '.join(problems)}",
        hint="It was damaged or edited after it was published: copy or export it again.",
    )


def _kind(mode: int) -> str:
    if stat.S_ISLNK(mode):
        return "symbolic link"
    return "folder" if stat.S_ISDIR(mode) else "special file"
