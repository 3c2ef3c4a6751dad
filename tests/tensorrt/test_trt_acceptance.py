"""The parts of benchmarks/trt_*.py that need no TensorRT; only a GPU shows what they measure."""

import importlib
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from enginecast.installation import install_command

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
NO_TENSORRT = pytest.mark.skipif(
    importlib.util.find_spec("tensorrt") is not None, reason="tensorrt is installed here"
)


@pytest.fixture(autouse=True)
def beside_the_scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)


def part(name: str) -> Any:
    """A file of benchmarks/, which is not a package: its scripts import by bare names."""
    return importlib.import_module(name)


@NO_TENSORRT
@pytest.mark.parametrize("name", ["trt_acceptance", "gpu_ort"])
def test_what_is_missing_is_said_before_anything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    if name == "gpu_ort" and torch.cuda.is_available():
        pytest.skip("here is a CUDA GPU")
    out = tmp_path / "out.json"
    assert part(name).main(["--out", str(out)]) == 3
    printed = capsys.readouterr()
    assert printed.out == ""
    if name == "trt_acceptance":
        assert printed.err.splitlines() == [
            "make trt-acceptance needs tensorrt, which is not installed",
            f"{install_command('tensorrt')} on Linux with an NVIDIA GPU",
            "in this checkout: .venv/bin/python -m pip install '.[dev,tensorrt]'",
        ]
    else:
        assert "device cuda: torch sees no CUDA GPU here" in printed.err
    assert not out.exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "chosen"), [("trt_acceptance", "t5-tiny,vit-tiny"), ("gpu_ort", "vit-tiny")]
)
def test_the_script_runs_from_end_to_end(tmp_path: Path, script: str, chosen: str) -> None:
    out = tmp_path / "out.json"
    command = [sys.executable, str(BENCHMARKS / f"{script}.py"), "--dry-run", "--no-compile"]
    subprocess.run(
        [*command, "--rounds", "2", "--only", chosen, "--precision", "fp16", "--out", str(out)],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    found = json.loads(out.read_text(encoding="utf-8"))
    assert found["finished"]
    assert found["smoke"]
    for case, rows in found["cases"].items():
        for row in rows["engines"].values():
            assert row["backend"] == "onnxruntime-cpu"
            if not case.endswith("chain"):
                assert 1e-4 < row["error"] < 0.02
                assert row["ms"] > 0
                assert row["verdict"]["outcome"] == "verified-by-emulation"
