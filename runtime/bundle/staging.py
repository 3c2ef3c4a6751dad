"""Publish a bundle atomically: all of it under its final name, or nothing.

Files are written into `.NAME.tmp-<id>` beside the target, flushed, listed in the manifest (which
comes last), and the folder is renamed.  A reader sees the old bundle or the new one, never a
mixture, and a failure leaves neither files nor folders behind.  The order write, flush, rename,
flush the parent is what Pillai et al. ("All File Systems Are Not Created Equal", OSDI 2014) found
to hold on every file system they looked at.
"""

import ctypes
import errno
import fcntl
import glob
import os
import shutil
import stat
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import msgspec

from enginecast.errors import BundleError, EnginecastError, MissingError, first_line
from enginecast.runtime.bundle.directory import descriptor_of, resolved
from enginecast.runtime.bundle.manifest import (
    MANIFEST_NAME,
    FileRecord,
    Manifest,
    Part,
    is_file_name,
)
from enginecast.runtime.bundle.manifest_json import decode, encode
from enginecast.runtime.bundle.reader import digest

ABANDONED_SECONDS = 60
"""Age in seconds from which an unlocked staging folder counts as abandoned: far more than the time
from mkdir to lock."""


_ATTEMPTS = 100
"""Most attempts of a rename while other processes rename the same folders."""
_OVERTAKEN = (errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST)
"""Errors of a rename if another process published, or moved the old bundle, in between."""
_ELSEWHERE = (errno.EXDEV, errno.EACCES, errno.EPERM, errno.EROFS)
"""Errors of writing next to a bundle if only the bundle itself is writable."""
_FULL = "Free some space, or write to another disk; what was there is as it was."

_LAYER = (
    "A folder in a lower layer of a container's image cannot be renamed: delete it first, or write"
    " to a volume; what was there is as it was."
)


class Staging:
    """A folder to write a bundle's files into, before the bundle exists.

    Made by `stage`.  Write files into `folder`, then call `publish` or `reject`, once.
    """

    def __init__(
        self, folder: Path, target: Path, *, overwrite: bool, marker: str, what: str = "bundle"
    ) -> None:
        self.folder = folder
        self.target = target
        self._overwrite = overwrite
        self._marker = marker
        self._what = what

    def publish(self, manifest: Manifest) -> Path:
        """Flush every file, list them in the manifest, and give the folder its final name.

        Args:
            manifest: `files` and `parts` are filled in: bundles published into the folder are
                parts.

        Raises:
            BundleError: the target appeared meanwhile, a file name is not allowed in a bundle, or
                the disk failed. An old bundle is left unchanged.
        """
        with _disk_errors(f"publishing {self.target}"):
            self._seal(manifest)
            self._swap_in(self.target, replace=self._overwrite)
        return self.target

    def withhold(self, manifest: Manifest, names: Sequence[str]) -> Path:
        """The same as `TARGET.rejected`, replacing an older one: a bundle that lacks something
        that was asked for.

        Args:
            names: of the report files that an earlier rejection may have left there.

        Raises:
            BundleError: see `publish` and `reject`.
        """
        rejected = self.target.with_name(f"{self.target.name}.rejected")
        with _disk_errors(f"writing {rejected}"):
            require = partial(_require_reports, rejected, names)
            require()
            self._seal(manifest)
            _swap_in(self.folder, rejected, require, replace=True)
            flush_folder(rejected.parent)
        return rejected

    def _seal(self, manifest: Manifest) -> None:
        """Flush every file, and list them in the manifest, which is written last."""
        parts = _parts(self.folder)
        inner = {part.name for part in parts}
        files = []
        for path in _regular_files(self.folder, inner):
            _flush_file(path)
            size, sha256 = path.stat().st_size, digest(path)
            files.append(FileRecord(name=path.name, size=size, sha256=sha256))
        path = self.folder / MANIFEST_NAME
        path.write_bytes(encode(msgspec.structs.replace(manifest, files=tuple(files), parts=parts)))
        _flush_file(path)
        flush_folder(self.folder)

    def publish_folders(self, *, rejected: bool = False) -> Path:
        """Flush every file, in folders within the folder, too, and give it its final name;
        `rejected`: `TARGET.rejected`, replacing an older one.
        """
        target = self.target.with_name(f"{self.target.name}.rejected") if rejected else self.target
        with _disk_errors(f"publishing {target}"):
            for folder, _, names in os.walk(self.folder):
                for name in names:
                    _flush_file(Path(folder, name))
                flush_folder(Path(folder))
            self._swap_in(target, replace=rejected or self._overwrite)
        return target

    def _swap_in(self, target: Path, *, replace: bool) -> None:
        require = partial(
            require_free, target, overwrite=replace, marker=self._marker, what=self._what
        )
        _swap_in(self.folder, target, require, replace=replace)
        with _disk_errors(f"{target} is published, but the disk did not confirm it"):
            flush_folder(target.parent)

    def reject(self, names: Sequence[str]) -> Path:
        """Keep only the named report files that are there, as `TARGET.rejected`, replacing an older
        one.

        Raises:
            BundleError: `TARGET.rejected` holds other files than reports, or the disk failed.
        """
        rejected = self.target.with_name(f"{self.target.name}.rejected")
        with _disk_errors(f"writing {rejected}"):
            require = partial(_require_reports, rejected, names)
            require()
            for part in _parts(self.folder):
                shutil.rmtree(self.folder / part.name)
            for path in _regular_files(self.folder):
                if path.name in names:
                    _flush_file(path)
                else:
                    path.unlink()
            _swap_in(self.folder, rejected, require, replace=True)
            flush_folder(rejected.parent)
        return rejected


@contextmanager
def stage(
    target: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    marker: str = MANIFEST_NAME,
    what: str = "bundle",
) -> Iterator[Staging]:
    """Open a staging folder next to `target`; whatever is not published by the end is removed.

    Args:
        target: path of the bundle's folder; a link is followed.
        overwrite: replace an existing bundle, at the moment of publishing.
        marker: name of the file that identifies such a folder.
        what: what such a folder is called in messages.

    Raises:
        BundleError: the target exists (and is not a bundle, or `overwrite` is off), or cannot be
            written, as a whole or a file of it.
        MissingError: the disk is full.
    """
    path = resolved(target)
    with _disk_errors(f"restoring {path}"):
        # A bundle that a process was replacing without `_exchange` when it was killed.
        found = path.parent.glob(f".{glob.escape(path.name)}.old-{'[0-9a-f]' * 32}")
        for aside in sorted(found, key=lambda one: -one.stat().st_ctime_ns):  # the newest first
            is_old = time.time() - aside.stat().st_ctime > ABANDONED_SECONDS
            if is_old and (aside / marker).is_file() and not os.path.lexists(path):
                aside.rename(path)
    require_target(path, overwrite=overwrite, marker=marker, what=what)
    folder, held = beside(path, "tmp"), None
    try:
        with _disk_errors(f"creating {folder}"):
            path.parent.mkdir(parents=True, exist_ok=True)
            # The staging folders of this target that killed processes left behind.
            for left in path.parent.glob(f".{glob.escape(path.name)}.tmp-*"):
                old = left.is_dir() and time.time() - left.stat().st_mtime > ABANDONED_SECONDS
                abandoned = lock(left) if old else None
                if abandoned is not None:
                    shutil.rmtree(left, ignore_errors=True)
                    os.close(abandoned)
            folder.mkdir()
            held = lock(folder)
        with _write_errors(folder):
            yield Staging(folder, path, overwrite=overwrite, marker=marker, what=what)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if held is not None:
            with suppress(OSError):  # the outcome is known; there is nothing to lose any more
                os.close(held)


class _Marks(msgspec.Struct):
    """The fields that identify our manifest: others write a manifest.json, too."""

    schema_version: int
    engines: list[msgspec.Raw]


def bundle_around(path: Path) -> Path | None:
    """The bundle that a new file or folder would be inside of, and would break; None: in none."""
    for folder in path.resolve().parents:
        try:
            msgspec.json.decode((folder / MANIFEST_NAME).read_bytes(), type=_Marks)
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            continue
        return folder
    return None


def outermost(path: Path) -> Path:
    """The outermost bundle that a file or folder is inside of; itself where it is in none."""
    while (around := bundle_around(path)) is not None:
        path = around
    return path


def require_target(
    target: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    marker: str = MANIFEST_NAME,
    what: str = "bundle",
) -> None:
    """Refuse a target that `stage` would refuse.

    Raises:
        BundleError: it exists (and is not a bundle, or `overwrite` is off), or is inside a bundle.
    """
    path = resolved(target)
    require_free(path, overwrite=overwrite, marker=marker, what=what)
    if (around := bundle_around(path)) is not None:
        raise BundleError(
            f"{target}: {around} is a bundle, whose files are sealed by their digests",
            hint="Write beside it.",
        )


def require_free(
    target: str | os.PathLike[str], *, overwrite: bool, marker: str, what: str
) -> None:
    """Refuse a target that exists, unless it is a bundle that may be replaced."""
    path = Path(target).resolve()
    holds = _holds(path, marker)
    if holds is None:
        return
    if not holds:
        raise BundleError(
            f"{path}: exists and is not a {what} (it holds no {marker})",
            hint="Choose another folder; this one is never replaced.",
        )
    if not overwrite:
        raise BundleError(f"{path}: a {what} already exists", hint="Replace it with --overwrite.")


def require_space(folder: str | os.PathLike[str], needed: int) -> None:
    """Refuse to begin if the disk of a folder, which need not exist yet, has fewer bytes free."""
    path = resolved(folder)
    existing = next(place for place in (path, *path.parents) if place.exists())
    free = shutil.disk_usage(existing).free
    if free < needed:
        raise MissingError(
            f"{path}: expected {needed / 1e6:.1f} MB free on this disk, got {free / 1e6:.1f} MB",
            hint="Free some space, or write to another disk.",
        )


def write_file(
    path: str | os.PathLike[str], data: bytes | memoryview, *, mode: int = 0o666
) -> None:
    """Write one file atomically.

    Readers of a bundle refuse unlisted files, so the temporary file is outside of the bundle,
    unless the enclosing folder is on another disk or not writable.
    """
    target = resolved(path)
    outside = beside(outermost(target), "tmp")
    with _disk_errors(f"writing {target}"):
        if outside.parent != target.parent:
            try:
                _write_by(outside, target, data, mode)
            except OSError as error:
                if error.errno not in _ELSEWHERE:
                    raise
            else:
                return
        _write_by(beside(target, "tmp"), target, data, mode)


def _write_by(temporary: Path, target: Path, data: bytes | memoryview, mode: int) -> None:
    try:
        temporary.touch(mode=mode & 0o700, exist_ok=False)
        temporary.write_bytes(data)
        _flush_file(temporary, mode)
        temporary.replace(target)
        flush_folder(target.parent)
    finally:
        with suppress(OSError):  # must not hide what went wrong; `leftovers` finds it
            temporary.unlink(missing_ok=True)


def is_full(error: BaseException) -> bool:
    """Whether an error means that a disk or a quota is full; libraries say it in words."""
    if isinstance(error, OSError):
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    text = str(error)
    return any(
        words in text for words in ("No space left on device", "os error 28", "os error 122")
    )


@contextmanager
def _write_errors(folder: Path) -> Iterator[None]:
    """Name the folder, or the file in it, that could not be written; leave other errors alone."""
    try:
        yield
    except EnginecastError:
        raise
    except Exception as error:  # of whatever library writes a file
        if is_full(error):
            message = f"writing {folder}: No space left on device ({first_line(error)})"
            raise MissingError(message, hint=_FULL) from error
        if not isinstance(error, OSError):
            raise
        if error.filename is None:  # as of reading and writing
            is_ours = error.errno in (errno.EIO, errno.EFBIG, errno.EROFS, errno.ESTALE)
        else:
            is_ours = str(error.filename).startswith(str(folder))
        if not is_ours:
            raise
        where = error.filename or folder
        raise BundleError(f"writing {where}: {error.strerror or error}") from error


@contextmanager
def _disk_errors(doing: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        if is_full(error):
            raise MissingError(f"{doing}: {error.strerror}{where}", hint=_FULL) from error
        hint = _LAYER if error.errno == errno.EXDEV else ""
        raise BundleError(f"{doing}: {error.strerror or error}{where}", hint=hint) from error


def beside(path: Path, kind: str) -> Path:
    """A temporary name for the future ("tmp") or former ("old") `path`: see `leftovers`."""
    return path.with_name(f".{path.name}.{kind}-{uuid.uuid4().hex}")


def lock(folder: Path) -> int | None:
    """Lock a folder while the returned descriptor is open; a killed process releases it."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # held by another process, or a file system without locks
        os.close(descriptor)
        return None
    return descriptor


def _holds(target: Path, marker: str) -> bool | None:
    """Whether the folder of this name holds the marker; None: it does not exist.

    Another process may be replacing the bundle. So the check is repeated if the opened folder has
    lost its name meanwhile: its marker may already be deleted.
    """
    while os.path.lexists(target):
        try:
            with descriptor_of(target, getattr(os, "O_PATH", os.O_RDONLY)) as descriptor:
                with suppress(FileNotFoundError, NotADirectoryError):
                    return stat.S_ISREG(os.stat(marker, dir_fd=descriptor).st_mode)
                if os.path.samestat(os.fstat(descriptor), target.stat()):
                    return False
        except FileNotFoundError:
            if target.is_symlink():
                return False
    return None


def _require_reports(rejected: Path, names: Sequence[str]) -> None:
    """Refuse to delete what is not an older set of reports, or a bundle that was withheld."""
    if not os.path.lexists(rejected) or _is_withheld(rejected):
        return
    foreign = not rejected.is_dir() or rejected.is_symlink()
    others = [] if foreign else sorted({path.name for path in rejected.iterdir()} - set(names))
    if foreign or others:
        what = f"holds {', '.join(others)}" if others else "is not a folder"
        raise BundleError(
            f"{rejected}: expected the reports of an earlier rejection, but it {what}",
            hint="Move it away; the reports of the rejected engine go there.",
        )


def _is_withheld(folder: Path) -> bool:
    """Whether a folder is a bundle that lacks what was asked for, without a user's consent."""
    try:
        manifest = decode((folder / MANIFEST_NAME).read_bytes())
    except (OSError, BundleError):
        return False
    return any(each.consent == "missing" for each in manifest.downgrades)


def _parts(folder: Path) -> tuple[Part, ...]:
    """The bundles that were published into a folder."""
    found = (path for path in sorted(folder.iterdir()) if (path / MANIFEST_NAME).is_file())
    return tuple(Part(name=path.name, sha256=digest(path / MANIFEST_NAME)) for path in found)


def _regular_files(folder: Path, parts: Collection[str] = ()) -> list[Path]:
    paths = sorted(path for path in folder.iterdir() if path.name not in parts)
    for path in paths:
        if path.is_symlink() or not path.is_file() or not is_file_name(path.name):
            raise BundleError(
                f"{path}: a bundle holds plain files named with [A-Za-z0-9._-] and no leading dot"
            )
    return paths


def _umask() -> int:
    """The process's umask. Python can only read it by changing it, which affects other threads;
    Linux shows it in /proc.
    """
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
            if line.startswith("Umask:"):
                return int(line.split()[1], 8)
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _flush_file(path: Path, mode: int = 0o666) -> None:
    path.chmod(mode & ~_umask())  # safetensors writes 0600, which no other user could read
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def flush_folder(folder: Path) -> None:
    """Flush the names in a folder to disk."""
    with descriptor_of(folder) as descriptor:
        os.fsync(descriptor)


def _swap_in(folder: Path, target: Path, require: Callable[[], None], *, replace: bool) -> None:
    """Rename `folder` to `target`; the old folder is removed afterwards, or restored on failure.

    Without `replace` the rename itself refuses a target that another process published in between.
    With it, of several processes that replace the same bundle the last one stays.

    Args:
        require: refuses a target that must not be replaced; called before each attempt.
    """
    asides: list[Path] = []
    try:
        for attempt in range(1, _ATTEMPTS + 1):
            require()
            try:
                if replace and target.exists():
                    if _exchange(folder, target):
                        return  # `stage` removes what `folder` holds now
                    aside = beside(target, "old")
                    target.rename(aside)
                    asides.append(aside)
                folder.rename(target)
            except OSError as error:
                if error.errno not in _OVERTAKEN or not folder.exists():
                    raise
                if attempt == _ATTEMPTS:
                    require()  # often says it better
                    raise
            else:
                return
    except BaseException:
        # The newest of several bundles gets its name back; the others are removed.  So is it where
        # another process has published meanwhile.  Where the disk fails, it stays beside the
        # target: `doctor --clean` restores it.
        if asides and not target.exists():
            try:
                asides[-1].rename(target)
            except OSError as error:
                if error.errno not in _OVERTAKEN:
                    asides.pop()
            else:
                asides.pop()
        raise
    finally:
        for aside in asides:
            shutil.rmtree(aside)


def _exchange(one: Path, other: Path) -> bool:
    """Exchange the names of two folders atomically, so that a kill leaves the old or the new one;
    whether the system can (Linux 3.15, most file systems): see renameat2(2).
    """
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    here = -100  # AT_FDCWD
    if renameat2(here, os.fsencode(one), here, os.fsencode(other), 2) == 0:  # RENAME_EXCHANGE
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):
        return False
    raise OSError(code, os.strerror(code), str(other))
