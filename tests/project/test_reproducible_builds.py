"""Equal sources give equal archives, wherever and however they are built."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NOT_COPIED = shutil.ignore_patterns(
    ".*",
    "__pycache__",
    "build",
    "dist",
    "demo",
    "*.egg-info",
    "tests",
    "campaigns",
    "benchmarks",
    "docs",
    "site",
)


@dataclass(frozen=True)
class Place:
    """A copy of the tree, and the circumstances of a build there."""

    tree: Path
    umask: int
    variables: dict[str, str]

    def ask(self, hook: str, out: Path, *, backend: str = "build_backend") -> Path:
        out.mkdir(parents=True)
        code = f"import sys, {backend} as it; print(it.{hook}(sys.argv[1]))"
        variables = os.environ | {"PYTHONPATH": str(self.tree / "release")} | self.variables
        variables.pop("SOURCE_DATE_EPOCH", None)
        run = subprocess.run(
            [sys.executable, "-c", code, str(out)],
            cwd=self.tree,
            umask=self.umask,
            env=variables,
            check=True,
            capture_output=True,
            text=True,
        )
        return out / run.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> tuple[Place, Place]:
    """A clean tree, and one where all that could matter differs."""
    folder = tmp_path_factory.mktemp("trees")
    clean = Place(folder / "a", 0o022, {"TZ": "UTC", "LC_ALL": "C", "PYTHONHASHSEED": "0"})
    used = Place(
        folder / "another much deeper place" / "b",
        0o077,
        {"TZ": "Asia/Tokyo", "LC_ALL": "C.UTF-8", "PYTHONHASHSEED": "1"},
    )
    for place in (clean, used):
        shutil.copytree(ROOT, place.tree, symlinks=True, ignore=NOT_COPIED)
    for path in used.tree.rglob("*.py"):
        path.chmod(0o700)
        os.utime(path, (1_000_000_000, 1_000_000_000))
    leftover = used.tree / "build" / "lib" / "enginecast" / "ghost.py"
    leftover.parent.mkdir(parents=True)
    leftover.touch()
    (used.tree / "enginecast" / "notes.txt").touch()
    return clean, used


@pytest.mark.slow
def test_two_builds_are_equal_byte_for_byte(places: tuple[Place, Place], tmp_path: Path) -> None:
    clean, used = places
    leaky = used.ask("build_wheel", tmp_path / "plain", backend="setuptools.build_meta")
    assert "enginecast/ghost.py" in zipfile.ZipFile(leaky).namelist(), "the leftover does leak"
    shutil.rmtree(used.tree / "enginecast.egg-info")  # of the build before

    sdists = [place.ask("build_sdist", tmp_path / f"sdist-{place.umask}") for place in places]
    wheels = [place.ask("build_wheel", tmp_path / f"wheel-{place.umask}") for place in places]
    with tarfile.open(sdists[1]) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    third = Place(unpacked, 0o027, {"TZ": "America/Lima"})
    wheels.append(third.ask("build_wheel", tmp_path / "wheel-of-sdist"))
    sdists.append(third.ask("build_sdist", tmp_path / "sdist-of-sdist"))

    assert len({_digest(path) for path in sdists}) == 1
    assert len({_digest(path) for path in wheels}) == 1
    assert _digest(leaky) != _digest(wheels[0])
    assert clean.tree != used.tree


def test_the_wheel_holds_the_packages_and_runs(places: tuple[Place, Place], tmp_path: Path) -> None:
    wheel = places[0].ask("build_wheel", tmp_path / "wheel")
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    installed = tmp_path / "installed"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*pip, "--target", installed, wheel], check=True)
    found = {
        path.relative_to(installed).as_posix()
        for path in (installed / "enginecast").rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    assert found == packed
    assert _tracked() == packed

    variables = os.environ | {"PYTHONPATH": str(installed), "TERM": "dumb"}
    code = "import enginecast; print(enginecast.__file__)"
    place = subprocess.check_output(
        [sys.executable, "-c", code], cwd=tmp_path, env=variables, text=True
    )
    assert Path(place.strip()).is_relative_to(installed)
    command = installed / "bin" / "enginecast"
    text = subprocess.check_output([command, "--help"], cwd=tmp_path, env=variables, text=True)
    assert "export" in text


def _tracked() -> set[str]:
    """The wheel's paths of all that git tracks in the packaged folders."""
    folders = ["enginecast", "capture", "passes", "exporters", "verification", "runtime", "cache"]
    command = ["git", "ls-files", "--cached", "--", *folders]
    names = subprocess.check_output(command, cwd=ROOT, text=True).splitlines()
    return {
        name if name.startswith("enginecast/") else f"enginecast/{name}"
        for name in names
        if not (ROOT / name).is_symlink()
    }


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
