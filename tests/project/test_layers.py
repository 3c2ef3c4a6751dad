"""The rules that docs/how-it-works/design.md sets for the folders, checked on the sources."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from enginecast.exporters.registry import TARGETS

ROOT = Path(__file__).parents[2]
FACE = ROOT / "enginecast"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
MAPPED: dict[str, str] = PROJECT["tool"]["setuptools"]["package-dir"]
PACKAGE_DIRS = {
    ".".join([package, *folder.relative_to(ROOT / mapped).parts]): str(folder.relative_to(ROOT))
    for package, mapped in MAPPED.items()
    for folder in sorted({path.parent for path in (ROOT / mapped).rglob("*.py")})
}
"""The folder of each package; rglob does not follow the links in enginecast/."""
LEAVES = {
    FACE / f"{name}.py"
    for name in (
        "errors",
        "installation",
        "library_names",
        "option_fields",
        "plugins",
        "printable",
        "public",
        "progress",
        "version",
    )
}
FOLDERS = sorted(set(MAPPED.values()) - {"enginecast"})
NOT_PACKAGED = {
    "tests",
    "campaigns",
    "benchmarks",
    "examples",
    "docs",
    "release",
    "build",
    "dist",
    "demo",
    "site",
}

MAY_IMPORT = {
    unit: imports.split()
    for unit, imports in (
        line.split(":")
        for line in Path(__file__).with_name("layers.txt").read_text("utf-8").splitlines()
        if not line.startswith("#")
    )
}
ENGINE_SIDE = [
    "enginecast.verification.metrics",
    "enginecast.verification.engine",
    "enginecast.verification.verdict",
    "enginecast.verification.floor",
    "enginecast.verification.reference",
    "enginecast.verification.report.files",
    "enginecast.verification.report.data",
    "enginecast.verification.emulate.profiles",
    "enginecast.verification.emulate.data",
    "enginecast.verification.rows",
]
RUNS_TORCH = {
    "device/torch_threads.py",
    "device/torch_values.py",
    "sessions/torch_session.py",
    "sessions/torchscript.py",
    "sessions/aotinductor.py",
    "values/device_tensor.py",
}


def sources() -> Iterator[tuple[str, Path]]:
    """(unit of the table, file) of every packaged source file; what all may import is "errors"."""
    for package, folder in PACKAGE_DIRS.items():
        unit = package.removeprefix("enginecast.")
        for path in sorted((ROOT / folder).glob("*.py")):
            yield ("errors" if path in LEAVES else unit), path


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


def imported_units(path: Path) -> Iterator[tuple[int, str]]:
    """(line, unit of the table) of every import of ours, lazy and type-only ones included."""
    for line, name in imports(path):
        if under(name, *(f"enginecast.{leaf.stem}" for leaf in LEAVES)):
            yield line, "errors"
        elif under(name, "enginecast"):
            package = max((known for known in PACKAGE_DIRS if under(name, known)), key=len)
            yield line, package.removeprefix("enginecast.")


def test_every_folder_imports_what_the_table_allows_and_the_table_allows_no_more() -> None:
    wrong, used = [], dict[str, set[str]]()
    for unit, path in sources():
        if unit == "errors":
            assert {other for _, other in imported_units(path)} <= {"errors"}
            continue
        assert unit in MAY_IMPORT, f"{unit} is new: add it to tests/project/layers.txt"
        for line, other in imported_units(path):
            used.setdefault(unit, set()).add(other)
            if other not in (unit, "errors", *MAY_IMPORT[unit]):
                wrong.append(f"{path.relative_to(ROOT)}:{line} imports {other}")
    assert wrong == []
    unused = {unit: set(may) - used.get(unit, set()) for unit, may in MAY_IMPORT.items()}
    assert {unit: names for unit, names in unused.items() if names} == {}


def test_no_folders_import_each_other_in_a_circle() -> None:
    list(TopologicalSorter(MAY_IMPORT).static_order())


def test_runtime_and_the_engine_side_of_verify_name_no_torch() -> None:
    torchless = [
        path
        for unit, path in sources()
        if unit.split(".")[0] == "runtime"
        and path.relative_to(ROOT / "runtime").as_posix() not in RUNS_TORCH  # do when opened
    ]
    torchless += [ROOT / f"{name.split('.', 1)[1].replace('.', '/')}.py" for name in ENGINE_SIDE]
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in torchless
        for line, name in imports(path)
        if under(name, "torch", "transformers")
    ]
    assert wrong == []


WITHOUT_TORCH = [
    "enginecast",
    "enginecast.errors",
    "enginecast.doctor.checks",
    "enginecast.runtime.load",
    "enginecast.passes.registry",
    "enginecast.exporters.registry",
    "enginecast.passes.presets",
    "enginecast.passes.ir.spec",
    "enginecast.cache.read.reader",
    "enginecast.cli.cache.upkeep_page",
    "enginecast.cli.cache.fill",
    *ENGINE_SIDE,
]


def test_importing_them_does_not_import_torch() -> None:
    code = f"for name in {WITHOUT_TORCH}: importlib.import_module(name); print(name, *sys.modules)"
    done = run_python(f"import importlib, sys\n{code}")
    assert done.returncode == 0, done.stderr
    at_fault = [line.split()[0] for line in done.stdout.splitlines() if "torch" in line.split()]
    assert at_fault == []


def test_help_does_not_import_torch() -> None:
    code = """
        import sys
        from enginecast.cli.app import main
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
        folder.name
        for folder in ROOT.iterdir()
        if folder.is_dir() and folder.name not in NOT_PACKAGED and folder.name[0] != "."
        if any(folder.rglob("*.py"))
    }
    assert with_code == set(MAPPED.values())
    assert set(MAPPED) == {"enginecast"} | {f"enginecast.{folder}" for folder in FOLDERS}


@pytest.mark.parametrize("folder", FOLDERS)
def test_bare_name_is_refused(folder: str) -> None:
    done = run_python(f"import sys; sys.path.insert(0, ''); import {folder}")
    assert done.returncode == 1
    assert f"ImportError: import enginecast.{folder}, not {folder}" in done.stderr


def test_no_file_names_a_folder_of_a_build_machine() -> None:
    names = re.compile(rb"/(work|farm)/")
    found = [
        name
        for name in git_files("--cached", "--others", "--exclude-standard")
        if (ROOT / name).is_file() and names.search((ROOT / name).read_bytes())
    ]
    assert found == []


NAMES_TARGETS = {
    "exporters/registry.py",
    "runtime/sessions/registry.py",
    "passes/quantize/plan/architectures.py",  # which products a runtime has is data of the GPU
    "passes/quantize/plan/forms.py",
    "passes/quantize/plan/options.py",
    "enginecast/ops/traits.py",
    "enginecast/ops/whole_rms_norm.py",
    "verification/emulate/profiles.py",  # names of its own, some of which are the same
    "verification/engine.py",  # a package's
    "enginecast/library_names.py",
    "enginecast/installation.py",  # which extra brings a package
    "enginecast/doctor/checks.py",
    "enginecast/doctor/imports.py",  # packages
    "enginecast/compiler/inspection/plan.py",  # a key of its JSON
}
NAMES_RUNG = {
    "enginecast/compiler/request.py",
    "enginecast/compiler/verify/recompare.py",
    "enginecast/compiler/export/scripted.py",
    "enginecast/compiler/export_attempts.py",
    "runtime/bundle/manifest.py",
}
"""They name the last rung of the capture ladder, which is called as a target is."""


def test_targets_are_named_in_their_own_folders_alone() -> None:
    """Nothing decides by the name of a target: it is asked, so that another one can be added."""
    wrong = []
    for unit, path in sources():
        file = path.relative_to(ROOT).as_posix()
        if file in NAMES_TARGETS or re.match(r"(exporters|runtime/sessions)/\w+[/.]", file):
            continue
        names = set(TARGETS)
        if file in NAMES_RUNG or unit.split(".")[0] == "capture":
            names.remove("torchscript")
        wrong += [
            f"{file}:{node.lineno} names {node.value}"
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            if isinstance(node, ast.Constant) and node.value in names
        ]
    assert wrong == []


def test_every_folder_says_what_it_is() -> None:
    silent = [
        folder
        for folder in PACKAGE_DIRS.values()
        if not ast.get_docstring(ast.parse((ROOT / folder / "__init__.py").read_text("utf-8")))
    ]
    assert silent == []
