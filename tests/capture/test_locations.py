"""Whose code a file holds, however its environment is put together."""

import inspect
import json
import os
import subprocess
import sys
import venv
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from models import tiny_t5
from torch import nn
from torch._export.db.examples import all_examples
from transformers import LlamaModel

import enginecast.capture
from enginecast.capture.python.locations import (
    SourceLocation,
    is_library_code,
    is_model_code,
    is_user_code,
    origin_of,
    real_path,
)

ROOT = Path(__file__).parents[2]


def test_files_of_this_process() -> None:
    example = all_examples()["dictionary"].model
    assert origin_of(__file__) == "user"
    assert origin_of(inspect.getfile(pytest)) == "installed"
    assert origin_of(inspect.getfile(LlamaModel)) == "library"
    assert origin_of(inspect.getfile(nn.Module)) == "torch"
    assert origin_of(inspect.getfile(np.linalg)) == "torch"
    assert origin_of(inspect.getfile(type(example))) == "installed"
    assert origin_of(inspect.getfile(inspect)) == "python"
    assert origin_of(inspect.getfile(enginecast.capture)) == "enginecast"
    assert origin_of("<string>") == "exec"
    assert origin_of("<eval_with_key>.3") == origin_of("<frozen importlib>") == "generated"


def test_whose_branches_count() -> None:
    library, installed = inspect.getfile(LlamaModel), inspect.getfile(pytest)
    torchs = inspect.getfile(torch.nn.functional)
    assert [is_model_code(file) for file in (library, installed, __file__)] == [True] * 3
    assert not is_model_code(torchs)
    assert [is_library_code(file) for file in (library, torchs)] == [True] * 2
    assert not is_library_code(installed)
    assert not is_library_code("<string>")
    assert is_user_code(__file__)


def test_a_location_has_one_name(tmp_path: Path) -> None:
    (tmp_path / "model.py").touch()
    (tmp_path / "link.py").symlink_to("model.py")
    linked = SourceLocation(str(tmp_path / "link.py"), 7)
    assert linked.resolved == (real_path(str(tmp_path / "model.py")), 7)
    assert str(linked) == f"{tmp_path}/link.py:7"


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


EDITABLE = json.dumps({"url": "file:///src", "dir_info": {"editable": True}})


@pytest.mark.parametrize("how", ["link", "pth"])
def test_an_editable_package_is_the_users(how: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").touch()
    site = environment(tmp_path / "env")
    source = package(tmp_path / "src", direct_url=EDITABLE)
    (source / "theirs-1.0.dist-info").rename(site / "theirs-1.0.dist-info")
    if how == "link":
        (site / "theirs").symlink_to(source / "theirs")
    else:
        (site / "theirs.pth").write_text(f"{source}\n")
    assert origins(tmp_path / "env", tmp_path) == ["user", "user", "python"]


PREPARE = """
import sys
sys.path.append({root!r})
from enginecast.capture.control_flow.converters.restructure import user_functions
from enginecast.capture.sources.open_source import open_source
from enginecast.compiler.prepare.program import ModelOptions, prepare
from enginecast.compiler.steps import Steps
import torch
assert {env!r} in torch.__file__
source = open_source({model!r})
found = user_functions(source.empty())
assert found == (), [(f.__module__, f.__qualname__, f.__code__.co_filename) for f in found]
prepared = prepare(source, ModelOptions(), Steps())
print(prepared.captured.branches, prepared.unverified)
"""


@pytest.mark.slow
def test_no_branch_of_torch_counts_in_a_linked_environment(tmp_path: Path) -> None:
    """It was, for `has_torch_function_unary(input) was never reached` in torch's own code."""
    site = environment(tmp_path / "env")
    for entry in sys.path:
        for package in Path(entry).iterdir() if entry.endswith("site-packages") else ():
            if not package.name.endswith(".pth") and not (site / package.name).exists():
                (site / package.name).symlink_to(package)
    (tmp_path / "link").symlink_to("env")
    model = tiny_t5(tmp_path / "model")
    code = PREPARE.format(root=str(ROOT), model=str(model), env=str(tmp_path / "link"))
    done = subprocess.run(
        [str(tmp_path / "link/bin/python"), "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "() ()\n"
