"""Read a bundle from disk. No file may be missing, added or changed.

No weight format notices damage by itself (flipped bits in a safetensors file load without an
error), so digests are checked before any other library opens a file.
"""

import hashlib
import os
import shlex
import stat
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from enginecast.errors import BundleError
from enginecast.public import some
from enginecast.runtime.bundle.directory import Directory, State, changed, resolved
from enginecast.runtime.bundle.manifest import (
    MANIFEST_NAME,
    MAX_MANIFEST_BYTES,
    SIGNATURE_NAME,
    TUNED_SUFFIX,
    FileRecord,
    Manifest,
)
from enginecast.runtime.bundle.manifest_json import decode
from enginecast.runtime.bundle.pipeline_folder import INDEX, pipeline_at

Check = Literal["full", "size"]

LARGE = 16 << 20
"""Bytes from which a weight file may be read in a separate thread; below, a thread does not pay."""


@dataclass(frozen=True)
class Bundle:
    """A bundle whose files agree with its manifest."""

    root: Path
    manifest: Manifest
    sha256: str
    """Digest of the manifest's file, which has the digests of all others; empty: the bundle is
    still being made, and nothing was checked."""
    _directory: Directory = field(repr=False, compare=False)
    _states: dict[str, State] = field(repr=False, compare=False)
    """State of each file when it was checked."""
    _left: "Future[list[str]] | None" = field(default=None, repr=False, compare=False)
    """Problems of files whose digests are still being computed."""
    parts: Mapping[str, "Bundle"] = field(default_factory=dict, compare=False)
    """The bundles within it, by name."""

    def __repr__(self) -> str:
        """Folder, model, engines and size."""
        engines = some(
            f"{one.target} {self.manifest.asked_precision} {one.verdict.outcome}"
            for one in self.manifest.engines
        )
        size = sum(file.size for file in self.manifest.files) / 1e6
        return f"Bundle({str(self.root)!r}: {self.manifest.model.name}, {engines}, {size:.3g} MB)"

    def require_whole(self) -> None:
        """Wait for digests that are computed in the background, and refuse what is damaged."""
        if self._left is not None and (problems := self._left.result()):
            raise _disagrees(self.root, problems)

    def require_unchanged(self) -> None:
        """Check that the files are those that were checked, after a library has opened them."""
        for name, state in self._states.items():
            try:
                same = self._directory.state(name) == state
            except OSError as error:
                raise changed(self.root, name) from error
            if not same:
                raise changed(self.root, name)

    def path(self, name: str) -> Path:
        """The path of a file of this bundle."""
        self._record(name)
        return self.root / name

    def size(self, name: str) -> int:
        """Bytes of a file."""
        return self._directory.state(self._record(name).name).size

    @property
    def folder(self) -> Path:
        """A path to the folder that was checked, for libraries that open files by name: it stays
        the same folder whatever is published under the bundle's name, while this object lives.
        """
        return self._directory.path

    def opened(self, name: str) -> AbstractContextManager[Path]:
        """A path to a file that was checked; it stays this file until the end of the `with`."""
        self._record(name)
        return self._directory.opened(name, self._states.get(name))

    def opened_signature(self) -> AbstractContextManager[Path]:
        """A path to the signature, which no manifest lists; a FileNotFoundError: there is none."""
        return self._directory.opened(SIGNATURE_NAME, None)

    def read(self, name: str) -> bytes:
        """The bytes of a file, compared with its digest again."""
        record = self._record(name)
        try:
            data = self._directory.read(name, self.size(name) + 1)
        except OSError as error:
            raise changed(self.root, name) from error
        if self.sha256 and hashlib.sha256(data).hexdigest() != record.sha256:
            raise _disagrees(self.root, [f"{name} has another sha256 than {record.sha256}"])
        return data

    def _record(self, name: str) -> FileRecord:
        for file in self.manifest.files:
            if file.name == name:
                return file
        raise BundleError(f"{self.root}: the bundle holds no {name}")


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
    root = resolved(path)
    try:
        directory = Directory(root)
    except OSError as error:
        if os.path.isdir(root):
            raise BundleError(f"{root}: {error.strerror}") from error
        what = "is not a folder" if os.path.lexists(root) else "does not exist"
        raise BundleError(f"{root}: expected the folder of a bundle, but it {what}") from error
    try:
        data = directory.read(MANIFEST_NAME, MAX_MANIFEST_BYTES + 1)
    except PermissionError as error:
        raise BundleError(f"{root / MANIFEST_NAME}: {error.strerror}") from error
    except (BundleError, OSError) as error:
        raise _no_bundle(root) from error
    try:
        manifest = decode(data)
    except BundleError as error:  # a pipeline holds several
        raise BundleError(f"{root}/{error.message}", hint=error.hint) from error
    if problems := list(_listing_problems(directory, manifest)):
        raise _disagrees(root, problems)
    states: dict[str, State] = {}
    sha256 = hashlib.sha256(data).hexdigest()
    parts = {}
    for part in manifest.parts:  # each has to be the one that the bundle was published with
        parts[part.name] = inner = open_bundle(root / part.name, check=check)
        if inner.sha256 not in (part.sha256, part.becomes):
            wrong = f"{part.name}/{MANIFEST_NAME} has sha256 {inner.sha256}, expected {part.sha256}"
            raise _disagrees(root, [wrong])
    if check == "size":
        return Bundle(root, manifest, sha256, directory, states, parts=parts)
    engines = {engine.file for engine in manifest.engines}
    weights = [f for f in manifest.files if f.size >= LARGE and f.name not in engines]
    left = None
    if beside and weights:
        try:  # what is opened meanwhile has to be what the digest is of
            states |= {file.name: directory.state(file.name) for file in weights}
        except OSError as error:
            raise changed(root, str(error.filename)) from error
        reader = ThreadPoolExecutor(1, thread_name_prefix="digests")  # hashing releases the GIL
        left = reader.submit(_digest_problems, directory, weights, states)
        reader.shutdown(wait=False)
    others = [f for f in manifest.files if left is None or f not in weights]
    if problems := _digest_problems(directory, others, states):
        raise _disagrees(root, [*problems, *(left.result() if left else ())])
    return Bundle(root, manifest, sha256, directory, states, left, parts)


def _no_bundle(root: Path) -> BundleError:
    """What a folder without a manifest is, and what to do with it."""
    if pipeline_at(root) == "engines":
        inner = sorted(root.glob(f"*/*/{MANIFEST_NAME}"))
        names = ", ".join(str(file.parent.relative_to(root)) for file in inner)
        return BundleError(
            f"{root}: expected a bundle, but it is a pipeline of engines",
            hint=f"`enginecast diffusers run` makes pictures with it. Its bundles: {names}",
        )
    kinds = {
        "config.json": ("is a model", "export"),
        INDEX: ("is a pipeline of diffusers", "diffusers export"),
    }
    is_damaged = (root / "report.json").exists()
    found = [k for name, k in kinds.items() if (root / name).is_file() and not is_damaged]
    what, command = (*found, (f"has no {MANIFEST_NAME}", "export"))[0]
    model = shlex.quote(str(root)) if found else "MODEL"
    return BundleError(
        f"{root}: expected a bundle, but it {what}",
        hint=f"`enginecast {command} {model} -o DIR` makes a bundle.",
    )


def unpublished(folder: Path, manifest: Manifest) -> Bundle:
    """A bundle without digests, which are computed when it is published."""
    return Bundle(folder, manifest, "", Directory(folder), {})


def digest(path: str | os.PathLike[str]) -> str:
    """The sha256 of a file, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _listing_problems(directory: Directory, manifest: Manifest) -> Iterator[str]:
    files = manifest.files
    present = directory.entries()
    present.pop(MANIFEST_NAME, None)
    for part in manifest.parts:
        found = present.pop(part.name, None)
        if found is None:
            yield f"{part.name} is missing"
        elif not stat.S_ISDIR(found.st_mode):
            yield f"{part.name} is a {_kind(found.st_mode)}, expected a folder"
    # What no manifest lists: the signature, and what was tuned of a part.
    for name in (SIGNATURE_NAME, *(f"{part.name}{TUNED_SUFFIX}" for part in manifest.parts)):
        found = present.pop(name, None)
        if found is not None and not stat.S_ISREG(found.st_mode):
            yield f"{name} is a {_kind(found.st_mode)}, expected a plain file"
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


def _digest_problems(
    directory: Directory, files: Sequence[FileRecord], states: dict[str, State]
) -> list[str]:
    problems = []
    for file in files:
        try:
            actual, state = directory.digest(file.name)
        except OSError as error:
            problems.append(f"{file.name} cannot be read ({error.strerror})")
        except BundleError as error:
            problems.append(error.message)
        else:
            if states.setdefault(file.name, state) != state:
                problems.append(f"{file.name} was changed while the bundle was being opened")
            elif actual != file.sha256:
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
