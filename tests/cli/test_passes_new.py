"""`enginecast passes new`: the package that it writes, and the names that it refuses."""

import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest
from exports import cast

Capture = pytest.CaptureFixture[str]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Fuse", "expected lower-case words joined by '-'"),
        ("fuse_silu", "got 'fuse_silu'"),
        ("fuse silu", "got 'fuse silu'"),
        ("../silu", "got '../silu'"),
        ("8bit", "got '8bit'"),
        ("silu-", "got 'silu-'"),
        ("", "got ''"),
        ("x" * 61, "at most 60 characters"),
        ("fuse-gelu", "a pass is called 'fuse-gelu' already: enginecast.passes.fuse_gelu:FuseGelu"),
    ],
)
def test_names_that_are_refused(name: str, message: str, tmp_path: Path, capsys: Capture) -> None:
    done = cast(capsys, "passes", "new", "-o", tmp_path / "out", "--", name)
    assert done.code == 2
    assert message in done.err
    assert done.err.count("error:") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["folder", "file", "dangling"])
def test_what_is_in_the_way_stays(kind: str, tmp_path: Path, capsys: Capture) -> None:
    target = tmp_path / "out"
    if kind == "folder":
        target.mkdir()
    elif kind == "file":
        target.write_text("mine", "utf-8")
    else:
        target.symlink_to(tmp_path / "nowhere")
    done = cast(capsys, "passes", "new", "fuse-silu", "-o", target)
    assert done.code == 2
    assert "exists already" in done.err
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def environment(folder: Path) -> Path:
    """The Python of a virtual environment that sees all packages of this one."""
    venv.create(folder, with_pip=False, symlinks=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    paths = [path for path in sys.path if path.endswith("site-packages")]
    lines = [f"import site; site.addsitedir({path!r})\n" for path in paths]
    (packages / "outer.pth").write_text("".join(lines), encoding="utf-8")
    return folder / "bin" / "python"


@pytest.mark.slow
def test_the_package_installs_and_its_own_checks_pass(tmp_path: Path, capsys: Capture) -> None:
    package, python = tmp_path / "gate-silu", environment(tmp_path / "venv")
    assert cast(capsys, "passes", "new", "gate-silu", "-o", package).code == 0

    # An editable install of enginecast is there for imports, and mypy reads no import hooks.
    env = {**os.environ, "MYPYPATH": str(Path(__file__).parents[2])}

    def checked(*command: str | Path) -> str:
        done = subprocess.run(
            list(map(str, command)),
            cwd=package,
            env=env,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    pip = (sys.executable, "-m", "pip", "--python", python, "install", "--no-deps")
    checked(*pip, "--no-build-isolation", "--no-index", "-e", ".")
    assert "4 passed" in checked(python, "-m", "pytest")
    checked(python, "-m", "ruff", "check", ".")
    checked(python, "-m", "ruff", "format", "--check", ".")
    checked(python, "-m", "mypy", "--follow-imports=silent")
    listed = checked(python, "-m", "enginecast", "passes", "--json")
    assert '"enginecast-gate-silu 0.1.0"' in listed

    source = package / "enginecast_gate_silu" / "gate_silu.py"
    right = source.read_text("utf-8")
    source.write_text(right.replace('found.node("x"),)', "found.root.args[1],)"), "utf-8")
    wrong = subprocess.run(
        [str(python), "-m", "pytest"], cwd=package, capture_output=True, text=True, check=False
    )
    assert wrong.returncode == 1, "the tests accept a pass that is wrong"
    assert "test_it_agrees_with_eager" in wrong.stdout
