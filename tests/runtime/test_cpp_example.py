"""examples/cpp: built against ONNX Runtime's headers, where there are any, and run on bundles."""

import os
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from exports import Exports

ROOT = Path(__file__).parents[2]
HEADER = "onnxruntime_cxx_api.h"
STANDARD = (
    Path("/usr/include/onnxruntime"),
    Path("/usr/include/onnxruntime/core/session"),
    Path("/usr/local/include/onnxruntime"),
    Path("/usr/local/include/onnxruntime/core/session"),
    Path("/usr/local/include"),
)
"""Where packages put the headers."""
JSON = ("/usr/include", "/usr/local/include")


def headers() -> Path:
    given = os.environ.get("ORT_INCLUDE_DIR")
    for folder in (Path(given),) if given else STANDARD:
        if (folder / HEADER).is_file():
            return folder
    where = f"ORT_INCLUDE_DIR={given}" if given else "ORT_INCLUDE_DIR is not set"
    pytest.skip(f"needs ONNX Runtime's {HEADER}: {where}")


def library(folder: Path) -> Path:
    """The library of the Python package, under the names that a linker and a loader look for."""
    spec = find_spec("onnxruntime")
    assert spec is not None
    assert spec.origin is not None
    (found,) = Path(spec.origin).parent.glob("capi/libonnxruntime.so.1.*")
    folder.mkdir()
    for name in ("libonnxruntime.so", "libonnxruntime.so.1"):
        (folder / name).symlink_to(found)
    return folder / "libonnxruntime.so"


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("cmake") is None or shutil.which("c++") is None:
        pytest.skip("needs cmake and a C++ compiler")
    if "nlohmann_json_DIR" not in os.environ and not any(
        (Path(folder) / "nlohmann" / "json.hpp").is_file() for folder in JSON
    ):
        pytest.skip("needs nlohmann-json3-dev, or nlohmann_json_DIR")
    include, folder = headers(), tmp_path_factory.mktemp("cpp")
    options = [f"-DORT_INCLUDE_DIR={include}", f"-DORT_LIBRARY={library(folder / 'lib')}"]
    source = ROOT / "examples" / "cpp"
    build = str(folder / "build")
    strict = "-DCMAKE_CXX_FLAGS=-Werror"
    configure = ["cmake", "-S", str(source), "-B", build, strict, *options]
    for command in (configure, ["cmake", "--build", build]):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    return folder / "build" / "run_engine"


def run(program: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [str(program), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "precision", "limit"),
    [
        ("words-clip", "fp32", "0.001"),
        ("words-clip", "fp16", "0.02"),
        ("t5", "int8-storage", "0.05"),
    ],
)
def test_engines_agree_with_eager(
    model: str, precision: str, limit: str, program: Path, exports: Exports
) -> None:
    done = run(program, exports(model, precision).folder, limit)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].endswith(" outputs agree with eager")


@pytest.mark.slow
def test_what_is_wrong_is_found(program: Path, exports: Exports, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.bundle"
    shutil.copytree(exports("words-clip").folder, wrong)
    reference = safetensors.numpy.load_file(wrong / "reference.safetensors")
    changed = {
        name: np.ascontiguousarray(value * 1.01 if "/out/" in name else value)
        for name, value in reference.items()
    }
    safetensors.numpy.save_file(changed, wrong / "reference.safetensors")
    done = run(program, wrong)
    assert done.returncode == 1
    assert "too large" in done.stdout
    (wrong / "reference.safetensors").write_bytes(b"\xff" * 100)
    done = run(program, wrong)
    assert (done.returncode, done.stdout) == (2, "")
    assert "the header is cut" in done.stderr
    assert run(program, tmp_path / "none").returncode == 2
    assert run(program).returncode == 2
