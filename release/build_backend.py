"""The project's build backend: setuptools, so that equal sources give equal bytes.

What goes into an archive is copied into an empty folder first: code and data of the folders that
pyproject.toml maps, with fixed modes.  So leftovers of earlier builds (`build/`, `*.egg-info`),
other files in the tree, the umask, and the folder's name reach no archive.  Dates are those of
`SOURCE_DATE_EPOCH`, or all 1980-01-01, the first that a zip file can hold.

An editable install is setuptools' own: it makes no archive that is published.
"""

from __future__ import annotations

import gzip
import io
import os
import shutil
import tarfile
import tempfile
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from setuptools import build_meta

Settings = dict[str, Any] | None

FIRST_DATE_OF_A_ZIP_FILE = 315532800
BESIDE_THE_PACKAGES = [
    "pyproject.toml",
    "setup.py",
    "CHANGELOG.md",
    "SECURITY.md",
    "release/build_backend.py",
]


def __getattr__(name: str) -> Any:
    """The other hooks are setuptools' own: editable installs, and what a build requires."""
    return getattr(build_meta, name)


def build_wheel(
    wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None
) -> str:
    """Writes the wheel; its metadata is made anew, for another caller's has that caller's modes."""
    target = str(Path(wheel_directory).resolve())
    with _staged():
        return str(build_meta.build_wheel(target, config_settings))


def prepare_metadata_for_build_wheel(
    metadata_directory: str, config_settings: Settings = None
) -> str:
    target = str(Path(metadata_directory).resolve())
    with _staged():
        return str(build_meta.prepare_metadata_for_build_wheel(target, config_settings))


def build_sdist(sdist_directory: str, config_settings: Settings = None) -> str:
    """Writes what a wheel is built from, and PKG-INFO."""
    target = Path(sdist_directory).resolve()
    with _staged() as stage, tempfile.TemporaryDirectory() as folder:
        files = {
            path.relative_to(stage).as_posix(): path.read_bytes()
            for path in stage.rglob("*")
            if path.is_file()
        }
        info = build_meta.prepare_metadata_for_build_wheel(folder, config_settings)
        files["PKG-INFO"] = Path(folder, info, "METADATA").read_bytes()
        stem = info.removesuffix(".dist-info")
        archive, date = target / f"{stem}.tar.gz", int(os.environ["SOURCE_DATE_EPOCH"])
        with (
            archive.open("wb") as file,
            gzip.GzipFile("", "wb", compresslevel=9, fileobj=file, mtime=date) as zipped,
            tarfile.open(fileobj=zipped, mode="w", format=tarfile.PAX_FORMAT) as tar,
        ):
            for name in sorted(files):
                member = tarfile.TarInfo(f"{stem}/{name}")
                member.size, member.mtime, member.mode = len(files[name]), date, 0o644
                tar.addfile(member, io.BytesIO(files[name]))
    return archive.name


@contextmanager
def _staged() -> Iterator[Path]:
    """Works in a copy of the sources, with fixed modes and dates."""
    root = Path.cwd()
    os.environ.setdefault("SOURCE_DATE_EPOCH", str(FIRST_DATE_OF_A_ZIP_FILE))
    umask = os.umask(0o022)
    try:
        with tempfile.TemporaryDirectory() as folder:
            stage = Path(folder)
            for name in sources(root):
                copy = stage / name
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(root / name, copy)
            os.chdir(stage)
            try:
                yield stage
            finally:
                os.chdir(root)
    finally:
        os.umask(umask)


def sources(root: Path) -> list[str]:
    """Code and data of the folders that pyproject.toml maps, without following links, and the rest
    that a build reads.
    """
    settings = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    project, setuptools = settings["project"], settings["tool"]["setuptools"]
    names = {project["readme"], *project["license-files"], *BESIDE_THE_PACKAGES}
    folders = {
        path.parent
        for mapped in setuptools["package-dir"].values()
        for path in (root / mapped).rglob("*.py")
    }
    for folder in folders:
        for pattern in ("*.py", *setuptools["package-data"]["*"]):
            names |= {path.relative_to(root).as_posix() for path in folder.glob(pattern)}
    return sorted(names)
