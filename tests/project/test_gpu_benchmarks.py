"""`make gpu DRY=1`: benchmarks/gpu.py on tiny models and the CPU; what it measures, only a GPU can
show.
"""

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script; benchmarks/ is not a package: its files import by bare names."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    threads = torch.get_num_threads()
    yield importlib.import_module("gpu")
    torch.set_num_threads(threads)


QUICK = "t5-tiny,vit", "compile,torchao,onnxruntime"
"""Of the models and engines, those without a C++ compiler."""


@pytest.mark.parametrize(
    ("only", "engines"), [QUICK, pytest.param("", "", marks=pytest.mark.slow, id="all")]
)
def test_a_dry_run_writes_a_row_for_every_engine(
    gpu: Any, tmp_path: Path, only: str, engines: str
) -> None:
    out = tmp_path / "out.json"
    asked = ["--only", only, "--engines", engines, "--out", str(out), "--commit", "abc"]
    assert gpu.main(["--dry-run", "--rounds", "1", *asked]) == 0
    found = json.loads(out.read_text("utf-8"))
    assert (found["finished"], found["machine"]["commit"]) == (True, "abc")
    assert found["smoke"]
    first = found["cases"]["t5-tiny"]
    assert first["engines"]["torchao fp8"]["absent"]
    assert 1e-4 < first["engines"]["torch.compile bf16"]["error"] < 0.03
    assert all(each["bf16_ms"] for each in first["products"])
    assert any(each["fp8_tensor_ms"] for each in first["products"])
    exported = found["cases"]["vit"]["engines"]["onnxruntime fp32"]
    assert exported["verdict"]["outcome"] == "verified"
    assert exported["over_compiled"]
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]


def test_what_fails_is_a_row(gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the exit code; a model that cannot be made, too, and time that is over."""

    def broken(*_: Any) -> Any:
        raise RuntimeError("no kernel")

    out = tmp_path / "out.json"
    run = ["--dry-run", "--rounds", "1", "--only", "t5-tiny", "--out", str(out)]
    monkeypatch.setattr(gpu, "measure_products", lambda *_: {})
    monkeypatch.setattr(gpu, "eager", broken)
    assert gpu.main([*run, "--engines", "eager,compile"]) == 1
    rows = json.loads(out.read_text("utf-8"))["cases"]["t5-tiny"]["engines"]
    assert rows["eager bf16"]["failed"] == "RuntimeError: no kernel"
    assert rows["torch.compile bf16"]["rounds"] == 1

    monkeypatch.setattr(gpu, "measure_products", broken)
    assert gpu.main(run) == 1
    rows = json.loads(out.read_text("utf-8"))["cases"]["t5-tiny"]["engines"]
    assert rows == {"model": {"failed": "RuntimeError: no kernel"}}

    assert gpu.main([*run, "--minutes", "0"]) == 0
    assert not json.loads(out.read_text("utf-8"))["finished"]


def test_a_machine_without_a_gpu_is_told(gpu: Any, capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert gpu.main([]) == 3
    assert "make gpu DRY=1" in capsys.readouterr().err
    with pytest.raises(SystemExit, match=r"--only vgg: there are t5-tiny, t5, vit, segformer"):
        gpu.main(["--dry-run", "--only", "vgg"])
