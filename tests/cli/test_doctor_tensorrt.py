"""What `enginecast doctor` says of TensorRT; the modules here are stand-ins with a version."""

from pathlib import Path

import pytest

from enginecast.doctor.checks import Library, TensorRT, examine_tensorrt, tensorrt_problems


def stand_in(folder: Path, name: str, code: str) -> None:
    (folder / name).mkdir()
    (folder / name / "__init__.py").write_text(code)


def library(name: str, version: str | None, reason: str = "") -> Library:
    return Library(name, version, installed=bool(version or reason), reason=reason)


def test_modules_are_imported_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(tmp_path, "tensorrt", "print('noise')\n__version__ = '11.0.0.114'\n")
    stand_in(tmp_path, "torch_tensorrt", "raise OSError('libtorchtrt.so: cannot open it')\n")
    monkeypatch.syspath_prepend(tmp_path)
    found = examine_tensorrt("2.13.0+cu130", "13.0")
    assert found.libraries[:2] == (
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


def test_a_module_that_does_not_import_is_installed_anew() -> None:
    libraries = (library("tensorrt", None, "libnvinfer.so.11: no such file"),)
    (problem,) = tensorrt_problems(TensorRT(libraries, "580.95"), "2.13.0", "13.0")
    assert problem.what.endswith("does not import: libnvinfer.so.11: no such file")
    assert problem.repair == (
        "pip install --force-reinstall 'torch-tensorrt==2.13.*' 'tensorrt-cu13==11.0.*'"
    )
