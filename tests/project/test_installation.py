"""Install commands that name where the package came from, and libraries that do not import."""

import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from enginecast import installation
from enginecast.errors import MissingError
from enginecast.installation import install_command, required, unavailable

FAILURES = {
    "another torch": 'raise RuntimeError("operator {0}::nms does not exist")',
    "a shared library": 'raise OSError("libcudart.so.12: cannot open shared object file")',
    "numpy's ABI": 'raise ValueError("numpy.dtype size changed")',
    "its own mistake": "1 / 0",
}


def fake(folder: Path, name: str, code: str, requires: str = "") -> Path:
    """A package on a path of its own, as pip would have installed it."""
    (folder / name).mkdir(parents=True)
    (folder / name / "__init__.py").write_text(code)
    about = folder / f"{name}-9.8.7.dist-info"
    about.mkdir()
    lines = ["Metadata-Version: 2.1", f"Name: {name}", "Version: 9.8.7"]
    lines += [f"Requires-Dist: {requires}"] if requires else []
    (about / "METADATA").write_text("\n".join([*lines, ""]))
    (about / "top_level.txt").write_text(f"{name}\n")
    return folder


@pytest.mark.parametrize(
    ("record", "wanted"),
    [
        ({"url": "{tree}", "dir_info": {}}, "pip install '{folder}[export]'"),
        (
            {"url": "{tree}/some%20wheel.whl", "archive_info": {}},
            "pip install '{folder}/some wheel.whl[export]'",
        ),
        (
            {"url": "https://host/x.git", "vcs_info": {"vcs": "git", "commit_id": "ab12"}},
            "pip install 'enginecast[export] @ git+https://host/x.git@ab12'",
        ),
        (
            {"url": "https://host/x.whl", "archive_info": {}},
            "pip install 'enginecast[export] @ https://host/x.whl'",
        ),
        ({"url": "file:///gone/x.whl", "archive_info": {}}, "pip install 'torch>="),
        ({}, "pip install 'torch>="),
    ],
)
def test_the_command_names_where_the_package_came_from(
    record: dict[str, Any], wanted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "some wheel.whl").touch()
    if "url" in record:
        record = record | {"url": record["url"].replace("{tree}", tmp_path.as_uri())}
    monkeypatch.setattr(installation, "_record", lambda: record)
    monkeypatch.setattr(installation, "__file__", str(tmp_path / "env" / "enginecast" / "x.py"))
    command = install_command("export")
    assert command.startswith(wanted.replace("{folder}", str(tmp_path)))
    assert "enginecast[" not in install_command("diffusers").partition(" @ ")[2]


@pytest.mark.parametrize("failure", FAILURES)
def test_a_library_that_does_not_import_is_named(
    failure: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"broken_{[*FAILURES].index(failure)}"
    fake(tmp_path / "a", name, FAILURES[failure].format(name))
    outer = f"try:\n    import {name}\nexcept Exception as error:\n"
    outer += "    raise ModuleNotFoundError('are the requirements right?') from error\n"
    fake(tmp_path / "b", f"outer_{name}", outer)
    monkeypatch.syspath_prepend(str(tmp_path / "a"))
    monkeypatch.syspath_prepend(str(tmp_path / "b"))
    with pytest.raises(MissingError) as caught, required(name, "a test", "export"):
        import_module(name)
    assert caught.value.message.startswith(f"{name} 9.8.7 is installed but does not import: ")
    assert caught.value.hint
    with pytest.raises(ModuleNotFoundError) as wrapped:
        import_module(f"outer_{name}")
    found = unavailable(wrapped.value, "a test")
    assert found is not None
    assert found.message == caught.value.message


def command(folder: Path, *words: str) -> tuple[int, list[str]]:
    """Exit code and messages of a command where the packages of a folder come first."""
    code = f"import sys; sys.path.insert(0, {str(folder)!r})\n"
    code += f"sys.argv[1:] = {list(words)!r}\nfrom enginecast.__main__ import main\nmain()\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    return done.returncode, done.stderr.splitlines()


@pytest.mark.parametrize(
    ("name", "words"),
    [("torchvision", ("export", "json:make", "-o", "out"))],
)
@pytest.mark.slow
def test_a_command_says_it_in_one_sentence(
    name: str, words: tuple[str, ...], tmp_path: Path
) -> None:
    fake(tmp_path, name, FAILURES["another torch"].format(name))
    code, lines = command(tmp_path, *words)
    assert code == 3, lines
    (said,) = [line for line in lines if line.startswith("error: ")]
    assert said.startswith(f"error: {name} 9.8.7 is installed but does not import: RuntimeError: ")
    assert lines[lines.index(said) + 1].startswith("pip install --force-reinstall --no-deps ")
    assert len(lines) <= 4
