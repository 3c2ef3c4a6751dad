"""What `enginecast doctor` says of TensorRT; the modules here are stand-ins with a version."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from enginecast.cli.doctor import show
from enginecast.doctor.checks import Library, Report, TensorRT, examine_tensorrt, tensorrt_problems


def stand_in(folder: Path, name: str, code: str) -> None:
    (folder / name).mkdir()
    (folder / name / "__init__.py").write_text(code)


def library(name: str, version: str | None, reason: str = "") -> Library:
    return Library(name, version, installed=bool(version or reason), reason=reason)


def reported(
    tensorrt: str | None,
    torch_tensorrt: str | None,
    *wrong: str,
    torch: str | None = "2.13.0+cu130",
    cuda: str | None = "13.0",
    driver: str | None = "580.95.05",
) -> list[tuple[str, str]]:
    libraries = (library("tensorrt", tensorrt), library("torch_tensorrt", torch_tensorrt))
    problems = tensorrt_problems(TensorRT(libraries, driver, wrong), torch, cuda)
    return [(problem.what, problem.repair) for problem in problems]


def test_modules_are_imported_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(tmp_path, "tensorrt", "print('noise')\n__version__ = '11.0.0.114'\n")
    stand_in(tmp_path, "torch_tensorrt", "raise OSError('libtorchtrt.so: cannot open it')\n")
    monkeypatch.syspath_prepend(tmp_path)
    found = examine_tensorrt("2.13.0+cu130", "13.0")
    assert found.libraries == (
        Library("tensorrt", "11.0.0.114", installed=True),
        Library("torch_tensorrt", None, True, "OSError: libtorchtrt.so: cannot open it"),
    )
    assert found.wrong == ()


def test_a_module_that_ends_the_process_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(tmp_path, "tensorrt", "import os\nos.abort()\n")
    monkeypatch.syspath_prepend(tmp_path)
    found = examine_tensorrt(None, None)
    assert found.libraries[0].reason == "the process ended with -6"


def test_versions_that_do_not_go_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(tmp_path, "tensorrt", "__version__ = '11.0.0.114'\n")
    monkeypatch.syspath_prepend(tmp_path)
    found = examine_tensorrt("2.11.0+cu128", "12.8")
    assert any("TensorRT 10.15" in sentence and "11.0" in sentence for sentence in found.wrong)
    problems = tensorrt_problems(found, "2.11.0+cu128", "12.8")
    repairs = [problem.repair for problem in problems if problem.what in found.wrong]
    assert repairs == [
        "pip install 'torch-tensorrt==2.11.*' 'tensorrt-cu13==10.15.*'",
        "pip install --force-reinstall 'torch==2.11.*'"
        " --index-url https://download.pytorch.org/whl/cu130",
    ]


def test_nothing_installed_and_all_that_fits_are_not_a_problem() -> None:
    assert reported(None, None, driver=None, torch="2.13.0+cpu", cuda=None) == []
    assert reported("11.0.0.114", "2.13.0") == []
    assert reported("11.0.0.114", None) == []


def test_no_driver_and_a_cpu_build_of_torch() -> None:
    ((what, repair),) = reported("11.0.0.114", None, driver=None)
    assert (what, "driver" in repair) == (
        "TensorRT is installed, and there is no NVIDIA driver",
        True,
    )
    ((what, repair),) = reported("11.0.0.114", None, torch="2.13.0+cpu", cuda=None)
    assert what == "TensorRT is installed, and this torch is a CPU build"
    assert repair.endswith("'torch==2.13.*' --index-url https://download.pytorch.org/whl/cu130")


def test_a_module_that_does_not_import_is_installed_anew() -> None:
    libraries = (library("tensorrt", None, "libnvinfer.so.11: no such file"),)
    (problem,) = tensorrt_problems(TensorRT(libraries, "580.95"), "2.13.0", "13.0")
    assert problem.what.endswith("does not import: libnvinfer.so.11: no such file")
    assert problem.repair == (
        "pip install --force-reinstall 'torch-tensorrt==2.13.*' 'tensorrt-cu13==11.0.*'"
    )


def test_a_torch_that_no_pair_is_known_for_gets_the_newest_pair() -> None:
    ((_, repair),) = reported("11.0.0.114", None, "torch 2.9.0: expected", torch="2.9.0")
    assert repair == "pip install 'torch==2.13.*' 'torch-tensorrt==2.13.*'"


def test_it_is_printed() -> None:
    libraries = (library("tensorrt", "11.0.0.114"), library("torch_tensorrt", None, "broken"))
    report = Report("0", "3", "linux", {}, (), (), None, (), tensorrt=TensorRT(libraries, "580.95"))
    out = io.StringIO()
    show(report, Console(file=out, width=100))
    assert "TensorRT: tensorrt 11.0.0.114, torch_tensorrt does not import\n" in out.getvalue()
    assert "NVIDIA driver: 580.95\n" in out.getvalue()
