"""The rules that docs/design.md sets for the folders, checked on the sources."""

import ast
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from layers import MAY_IMPORT

ROOT = Path(__file__).parent.parent
FACE = ROOT / "enginecast"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PACKAGE_DIRS: dict[str, str] = PROJECT["tool"]["setuptools"]["package-dir"]
FOLDERS = sorted(set(PACKAGE_DIRS.values()) - {"enginecast"})
NOT_PACKAGED = {"tests", "benchmarks", "examples", "docs", "build", "dist", "demo"}

ENGINE_SIDE = [
    "enginecast.verify.metrics",
    "enginecast.verify.engine",
    "enginecast.verify.verdict",
    "enginecast.verify.verdict_notes",
    "enginecast.verify.comparison",
    "enginecast.verify.padding",
    "enginecast.verify.reference",
    "enginecast.verify.report",
    "enginecast.verify.report_data",
    "enginecast.verify.emulate_profiles",
    "enginecast.verify.emulation_data",
    "enginecast.verify.report_emulation",
    "enginecast.verify.report_page",
]
RUNS_TORCH = {
    "torch_values.py",
    "torchscript_session.py",
    "aotinductor_session.py",
    "device_tensor.py",
}


def sources() -> Iterator[tuple[str, Path]]:
    """(unit of the table, file) of every packaged source file."""
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).glob("*.py")):
            yield f"enginecast.{folder}", path
    for path in sorted(FACE.glob("*.py")):
        yield f"enginecast.{path.stem}", path


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every import, inside functions too."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def under(name: str, *prefixes: str) -> bool:
    return any(f"{name}.".startswith(f"{prefix}.") for prefix in prefixes)


def run_python(code: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", "-c", code]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)


def git_files(*options: str) -> list[str]:
    command = ["git", "-C", str(ROOT), "ls-files", *options]
    listed = subprocess.run(command, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip(f"needs a git checkout: {listed.stderr.strip()}")
    return listed.stdout.splitlines()


def test_folders_import_what_the_design_allows_and_nothing_else() -> None:
    wrong = []
    for unit, path in sources():
        assert unit in MAY_IMPORT, f"{unit} is new: add it to docs/design.md and to tests/layers.py"
        allowed = [unit, "enginecast.errors", "enginecast.__version__", *MAY_IMPORT[unit]]
        wrong += [
            f"{path.relative_to(ROOT)}:{line} imports {name}"
            for line, name in imports(path)
            if under(name, "enginecast") and not under(name, *allowed)
        ]
    assert wrong == []


def test_runtime_and_the_engine_side_of_verify_name_no_torch() -> None:
    torchless = [
        path
        for unit, path in sources()
        if unit == "enginecast.runtime" and path.name not in RUNS_TORCH  # do when they are opened
    ]
    torchless += [ROOT / f"{name.split('.', 1)[1].replace('.', '/')}.py" for name in ENGINE_SIDE]
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in torchless
        for line, name in imports(path)
        if under(name, "torch", "transformers")
    ]
    assert wrong == []


@pytest.mark.parametrize(
    "module",
    [
        "enginecast",
        "enginecast.errors",
        "enginecast.doctor",
        "enginecast.runtime.load",
        "enginecast.passes.registry",
        "enginecast.passes.presets",
        "enginecast.passes.spec",
        "enginecast.cache.reader",
        "enginecast.commands_cache",
        "enginecast.commands_cache_fill",
        *ENGINE_SIDE,
    ],
)
def test_importing_it_does_not_import_torch(module: str) -> None:
    done = run_python(f"import sys, {module}; sys.exit('torch' in sys.modules)")
    assert done.returncode == 0, done.stderr or f"{module} imports torch"


def test_help_does_not_import_torch() -> None:
    code = """
        import sys
        from enginecast.cli import main
        sys.argv = ["enginecast", "--help"]
        try:
            main()
        except SystemExit as stop:
            assert not stop.code, stop.code
        assert "torch" not in sys.modules, "help imports torch"
    """
    done = run_python("\n".join(line[8:] for line in code.splitlines()))
    assert done.returncode == 0, done.stderr
    assert "export" in done.stdout


def test_every_folder_with_code_is_packaged() -> None:
    with_code = {
        path.parent.relative_to(ROOT).as_posix()
        for folder in ROOT.iterdir()
        if folder.is_dir() and folder.name not in NOT_PACKAGED and folder.name[0] != "."
        for path in folder.rglob("*.py")  # does not follow the links in enginecast/
    }
    assert with_code == set(PACKAGE_DIRS.values())
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == set(PACKAGE_DIRS)
    for package, folder in PACKAGE_DIRS.items():
        assert package == ("enginecast" if folder == "enginecast" else f"enginecast.{folder}")


def test_data_beside_the_code_is_packaged() -> None:
    data = PROJECT["tool"]["setuptools"]["package-data"]
    beside = {
        f"enginecast.{folder}": sorted(p.name for p in (ROOT / folder).glob("*.json"))
        for folder in FOLDERS
        if list((ROOT / folder).glob("*.json"))
    }
    assert beside == {name: files for name, files in data.items() if name != "enginecast"}


def test_every_packaged_folder_has_its_link() -> None:
    links = {path.name: os.readlink(path) for path in FACE.iterdir() if path.is_symlink()}
    assert links == {folder: f"../{folder}" for folder in FOLDERS}


def test_git_stores_the_links_as_links() -> None:
    staged = [line.split() for line in git_files("--stage", "enginecast")]
    modes = {fields[3]: fields[0] for fields in staged}
    assert {modes.get(f"enginecast/{folder}") for folder in FOLDERS} == {"120000"}


@pytest.mark.parametrize("folder", FOLDERS)
def test_bare_name_is_refused(folder: str) -> None:
    done = run_python(f"import {folder}")
    assert done.returncode == 1
    assert f"ImportError: import enginecast.{folder}, not {folder}" in done.stderr


def test_no_source_file_is_over_300_lines_and_no_test_file_over_400() -> None:
    limits = {path: 300 for _, path in sources()}
    for folder in ("benchmarks", "examples"):
        limits |= dict.fromkeys((ROOT / folder).rglob("*.py"), 300)
    limits |= dict.fromkeys((ROOT / "tests").rglob("*.py"), 400)
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in limits}
    too_long = {
        path.relative_to(ROOT).as_posix(): length
        for path, length in lengths.items()
        if length > limits[path]
    }
    assert too_long == {}


def test_no_file_names_a_folder_of_a_build_machine() -> None:
    names = re.compile(rb"/(work|farm)/")
    found = [
        name
        for name in git_files("--cached", "--others", "--exclude-standard")
        if (ROOT / name).is_file() and names.search((ROOT / name).read_bytes())
    ]
    assert found == []
