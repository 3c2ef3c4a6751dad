"""Environments of their own, made from what is installed here: nothing needs a network."""

import os
import shutil
import sys
import venv
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
OFFLINE = {
    "PIP_CONFIG_FILE": os.devnull,
    "PIP_NO_INDEX": "1",
    "PIP_FIND_LINKS": "",
    "PIP_NO_BUILD_ISOLATION": "0",  # pip's way to switch isolation off
    "PIP_NO_DEPS": "0",
    "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    "PIP_NO_COMPILE": "1",  # a test imports a tenth of the files
    "PYTHONPATH": "",
}
"""pip takes what is there, and builds with the setuptools that is there."""
PIP = "#!{}\nimport sys\nfrom pip._internal.cli.main import main\nsys.exit(main())\n"
LIBRARIES = f"lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"


def bare(folder: Path) -> Path:
    """An environment with nothing in it; where its packages go."""
    venv.EnvBuilder(symlinks=True).create(folder)
    return folder / LIBRARIES


def with_everything(folder: Path) -> Path:
    """An environment that sees all that is installed here, below what is installed in itself."""
    packages = bare(folder)
    here = Path(str(metadata.distribution("numpy").locate_file(""))).resolve()
    (packages / "everything.pth").write_text(f"{here}\n")
    pip = folder / "bin" / "pip"
    pip.write_text(PIP.format(folder / "bin" / "python"))
    pip.chmod(0o755)
    return packages


def closure(names: Iterable[str]) -> set[str]:
    """These distributions without extras, and all that they need here."""
    found: set[str] = set()
    waiting = [canonicalize_name(name) for name in names]
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        found.add(name)
        for text in metadata.requires(name) or ():
            asked = Requirement(text)
            if asked.marker is None or asked.marker.evaluate({"extra": ""}):
                waiting.append(canonicalize_name(asked.name))
    return found


def copy(distribution: metadata.Distribution, packages: Path) -> None:
    """The files of a distribution that lie in a folder of packages; commands are left out."""
    for file in distribution.files or ():
        source = Path(str(distribution.locate_file(file)))
        if ".." in file.parts or not source.is_file() or source.suffix == ".pyc":
            continue
        target = packages / file
        target.parent.mkdir(parents=True, exist_ok=True)
        linked(source, target)


def linked(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system
        shutil.copyfile(source, target)
