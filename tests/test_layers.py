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
WORKERS = [f"enginecast.{folder}" for folder in FOLDERS]
# What an export consists of; the order in which each builds on the ones before.
STEPS = [
    "enginecast.steps",
    "enginecast.cases",
    "enginecast.model_inputs",
    "enginecast.structured",
    "enginecast.ways",
    "enginecast.plan",
    "enginecast.quantization",
    "enginecast.prepare",
    "enginecast.rewrite",
    "enginecast.trial",
    "enginecast.culprits",
    "enginecast.describe",
    "enginecast.engines",
    "enginecast.build_log",
]
# The table of docs/design.md.  Everybody may import enginecast.errors and their own folder.
MAY_IMPORT: dict[str, list[str]] = {
    "enginecast.capture": [
        "enginecast.runtime",
        "enginecast.passes.source",
        "enginecast.passes.structure",
    ],
    "enginecast.passes": ["enginecast.ops", "enginecast.quantized_ops"],
    "enginecast.exporters": [
        "enginecast.runtime",
        "enginecast.passes",
        "enginecast.ops",
        "enginecast.quantized_ops",
    ],
    "enginecast.verify": [
        "enginecast.runtime",
        "enginecast.passes",
        "enginecast.quantized_ops",
        "enginecast.CallableFolder",
    ],
    "enginecast.runtime": [],
    "enginecast.cache": ["enginecast.runtime", "enginecast.capture"],
    "enginecast.errors": [],
    "enginecast.ops": [],
    "enginecast.quantized_ops": [],
    "enginecast.doctor_report": [],
    "enginecast.doctor_page": ["enginecast.doctor_report"],
    "enginecast.doctor_tensorrt": ["enginecast.doctor_report", "enginecast.runtime"],
    "enginecast.doctor": ["enginecast.doctor_report", "enginecast.doctor_tensorrt"],
    "enginecast.memory": [],
    "enginecast.budget": ["enginecast.memory", "enginecast.plan", *WORKERS],
    "enginecast.steps": ["enginecast.memory"],
    "enginecast.devices": WORKERS,
    "enginecast.skip_modules": WORKERS,
    "enginecast.plan": ["enginecast.devices", "enginecast.skip_modules", *WORKERS],
    "enginecast.quantization": ["enginecast.plan", *WORKERS],
    "enginecast.quantization_page": ["enginecast.terminal", *WORKERS],
    "enginecast.tensorrt_page": ["enginecast.terminal", *WORKERS],
    "enginecast.cases": ["enginecast.steps", *WORKERS],
    "enginecast.model_inputs": ["enginecast.cases", *WORKERS],
    "enginecast.structured": WORKERS,
    "enginecast.ways": ["enginecast.cases", *WORKERS],
    "enginecast.prepare": [
        "enginecast.cases",
        "enginecast.model_inputs",
        "enginecast.steps",
        "enginecast.structured",
        "enginecast.ways",
        *WORKERS,
    ],
    "enginecast.rewrite": ["enginecast.prepare", "enginecast.steps", *WORKERS],
    "enginecast.trial": ["enginecast.plan", "enginecast.rewrite", *WORKERS],
    "enginecast.culprits": [
        "enginecast.prepare",
        "enginecast.rewrite",
        "enginecast.steps",
        "enginecast.trial",
        *WORKERS,
    ],
    "enginecast.describe": [
        "enginecast.plan",
        "enginecast.prepare",
        "enginecast.quantization",
        "enginecast.rewrite",
        *WORKERS,
    ],
    "enginecast.engines": [
        "enginecast.describe",
        "enginecast.plan",
        "enginecast.prepare",
        "enginecast.rewrite",
        "enginecast.steps",
        "enginecast.trial",
        *WORKERS,
    ],
    "enginecast.build_log": ["enginecast.doctor", *WORKERS],
    "enginecast.job": [*STEPS, *WORKERS],
    "enginecast.scripted": [*STEPS, *WORKERS],
    "enginecast.explore": ["enginecast.scripted", *STEPS, *WORKERS],
    "enginecast.script_engine": ["enginecast.job", "enginecast.scripted", *STEPS, *WORKERS],
    "enginecast.script_job": [
        "enginecast.build_log",
        "enginecast.job",
        "enginecast.script_engine",
        "enginecast.explore",
        "enginecast.scripted",
        *STEPS,
        *WORKERS,
    ],
    "enginecast.driver": [
        "enginecast.budget",
        "enginecast.job",
        "enginecast.script_job",
        *STEPS,
        *WORKERS,
    ],
    "enginecast.forecast": [*STEPS, *WORKERS],
    "enginecast.source_clamps": [],
    "enginecast.census_page": ["enginecast.source_clamps", "enginecast.terminal", *WORKERS],
    "enginecast.flow_page": ["enginecast.prepare", "enginecast.terminal", *WORKERS],
    "enginecast.advice_words": ["enginecast.terminal"],
    "enginecast.advice": ["enginecast.advice_words", "enginecast.prepare", *WORKERS],
    "enginecast.readiness": ["enginecast.tensorrt_page", "enginecast.devices", *STEPS, *WORKERS],
    "enginecast.inspection": [
        "enginecast.readiness",
        "enginecast.advice",
        "enginecast.advice_words",
        "enginecast.census_page",
        "enginecast.flow_page",
        "enginecast.forecast",
        "enginecast.quantization_page",
        "enginecast.terminal",
        *STEPS,
        *WORKERS,
    ],
    "enginecast.recompare": ["enginecast.scripted", *STEPS, *WORKERS],
    "enginecast.check": ["enginecast.recompare", *WORKERS],
    "enginecast.terminal": [],
    "enginecast.commands_engine": ["enginecast.check", "enginecast.terminal", *WORKERS],
    "enginecast.commands_opt": [
        "enginecast.commands_engine",
        "enginecast.terminal",
        *STEPS,
        *WORKERS,
    ],
    "enginecast.commands_bisect": [
        "enginecast.commands_engine",
        "enginecast.terminal",
        *STEPS,
        *WORKERS,
    ],
    "enginecast.commands": [
        "enginecast.commands_engine",
        "enginecast.terminal",
        "enginecast.driver",
        "enginecast.flow_page",
        "enginecast.inspection",
        "enginecast.job",
        "enginecast.memory",
        *STEPS,
        *WORKERS,
    ],
    "enginecast.cli_options": [],
    "enginecast.cli_errors": ["enginecast.terminal"],
    "enginecast.cli_tensorrt": ["enginecast.exporters.tensorrt_options"],
    "enginecast.cli_export": [
        "enginecast.cli_options",
        "enginecast.cli_tensorrt",
        "enginecast.commands",
        "enginecast.commands_engine",
        "enginecast.plan",
        "enginecast.prepare",
        "enginecast.terminal",
    ],
    "enginecast.cli_passes": [
        "enginecast.cli_options",
        "enginecast.commands",
        "enginecast.commands_bisect",
        "enginecast.commands_opt",
        "enginecast.plan",
        "enginecast.prepare",
        "enginecast.terminal",
    ],
    "enginecast.cli": [
        "enginecast.cli_errors",
        "enginecast.cli_export",
        "enginecast.cli_options",
        "enginecast.cli_passes",
        "enginecast.commands_engine",
        "enginecast.doctor",
        "enginecast.doctor_page",
        "enginecast.plan",
        "enginecast.prepare",
        "enginecast.terminal",
    ],
    "enginecast.__main__": ["enginecast.cli"],
    "enginecast.__init__": ["enginecast.check", "enginecast.driver", "enginecast.runtime.load"],
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
        assert unit in MAY_IMPORT, f"{unit} is new: add it to docs/design.md and to this table"
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
