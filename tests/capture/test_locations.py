"""Whose code a file holds, however its environment is put together."""

import inspect
import json
import subprocess
import venv
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import LlamaModel

from enginecast.capture.python.locations import (
    is_library_code,
    is_model_code,
    is_user_code,
)

ROOT = Path(__file__).parents[2]


def test_whose_branches_count() -> None:
    library, installed = inspect.getfile(LlamaModel), inspect.getfile(pytest)
    torchs = inspect.getfile(torch.nn.functional)
    assert [is_model_code(file) for file in (library, installed, __file__)] == [True] * 3
    assert not is_model_code(torchs)
    assert [is_library_code(file) for file in (library, torchs)] == [True] * 2
    assert not is_library_code(installed)
    assert not is_library_code("<string>")
    assert is_user_code(__file__)


PROGRAM = """
import sys, json
sys.path[:0] = {path!r}
sys.path.append({root!r})
import mine, theirs.inner, calendar
from enginecast.capture.python.locations import origin_of
print(json.dumps([origin_of(module.__file__) for module in (mine, theirs.inner, calendar)]))
"""


def package(folder: Path, *, direct_url: str = "") -> Path:
    """The package `theirs`, as an installer leaves it."""
    inner = folder / "theirs" / "inner.py"
    inner.parent.mkdir(parents=True)
    inner.touch()
    (inner.parent / "__init__.py").touch()
    info = folder / "theirs-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    (info / "RECORD").write_text("theirs/__init__.py,,\ntheirs/inner.py,,\n")
    if direct_url:
        (info / "direct_url.json").write_text(direct_url)
    return folder


def environment(folder: Path) -> Path:
    """A virtual environment of its own, and its site-packages."""
    venv.create(folder, symlinks=True)
    [found] = folder.glob("lib/python*/site-packages")
    return found


def origins(python: Path, *path: Path) -> list[str]:
    """Of the user's `mine`, the package `theirs` and a file of Python, in an environment."""
    code = PROGRAM.format(path=[str(entry) for entry in path], root=str(ROOT))
    done = subprocess.run(
        [str(python / "bin/python"), "-c", code], capture_output=True, text=True, check=True
    )
    found: list[str] = json.loads(done.stdout)
    return found


def linked_environment(folder: Path, models: Path) -> list[str]:
    package(environment(folder / "env"))
    (folder / "link").symlink_to("env")
    return origins(folder / "link", models)


def linked_site_packages(folder: Path, models: Path) -> list[str]:
    site = environment(folder / "env")
    package(folder / "elsewhere")
    site.rmdir()
    site.symlink_to(folder / "elsewhere")
    return origins(folder / "env", models)


def linked_package(folder: Path, models: Path) -> list[str]:
    site = environment(folder / "env")
    for entry in package(folder / "cache").iterdir():
        (site / entry.name).symlink_to(entry)
    return origins(folder / "env", models)


def linked_files(folder: Path, models: Path) -> list[str]:
    site = environment(folder / "env")
    for file in package(folder / "cache").rglob("*.*"):
        if file.is_file():
            target = site / file.relative_to(folder / "cache")
            target.parent.mkdir(exist_ok=True)
            target.symlink_to(file)
    return origins(folder / "env", models)


def target_folder(folder: Path, models: Path) -> list[str]:
    environment(folder / "env")
    return origins(folder / "env", models, package(folder / "vendored"))


def below_the_environment(folder: Path, models: Path) -> list[str]:
    package(environment(folder / "env"))
    inside = folder / "env" / "src"
    models.rename(inside)
    return origins(folder / "env", inside)


def called_site_packages(folder: Path, models: Path) -> list[str]:
    package(environment(folder / "env"))
    inside = folder / "site-packages"
    models.rename(inside)
    return origins(folder / "env", inside)


@pytest.mark.parametrize(
    "arrange",
    [
        linked_environment,
        linked_site_packages,
        linked_package,
        linked_files,
        target_folder,
        below_the_environment,
        called_site_packages,
    ],
)
def test_an_installed_package_and_a_users_model(
    arrange: Callable[[Path, Path], list[str]], tmp_path: Path
) -> None:
    models = tmp_path / "models"
    models.mkdir()
    (models / "mine.py").touch()
    assert arrange(tmp_path, models) == ["user", "installed", "python"]
