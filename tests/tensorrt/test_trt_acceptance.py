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
from cpu_stand_in import use_stand_in
from fake_tensorrt import install

from enginecast.installation import install_command
from enginecast.passes.registry import build as build_passes

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


def test_builds_are_those_of_the_routes() -> None:
    acceptance = part("trt_acceptance")
    parser = part("trt_run").options_of("doc")
    parser.add_argument("--routes", default="onnx,torch")

    def names(*arguments: str) -> list[str]:
        return [one.name for one in acceptance.builds_of(parser.parse_args(arguments))]

    assert names() == ["tensorrt-onnx", "tensorrt-torch", "onnxruntime-cuda"]
    assert names("--routes", "torch") == ["tensorrt-torch", "onnxruntime-cuda"]
    assert names("--dry-run") == ["onnxruntime-cpu"]
    with pytest.raises(SystemExit, match="--routes cpp: there are onnx, torch"):
        names("--routes", "cpp")


def test_every_subject_has_a_case_that_lies_within_its_ranges() -> None:
    names = []
    for subject in part("trt_models").subjects(small=True):
        names.append(subject.name)
        sizes = subject.optimal()
        for text in subject.dynamic:
            place, _, ends = text.partition("=")
            name, _, axis = place.partition(":")
            least, _, most = ends.partition("..")
            assert int(least) <= sizes[name][int(axis)] <= int(most or least)
    assert names == [
        f"{name}-tiny" for name in ("t5", "umt5", "clip-text", "clip-vision", "vit", "segformer")
    ]
    large = [one.name for one in part("trt_models").subjects(small=False)]
    assert [f"{name}-tiny" for name in large] == names


@pytest.mark.parametrize(("target", "device"), [("tensorrt", "cuda"), ("onnxruntime", "cpu")])
def test_fp8_takes_layers_that_gain_nothing(target: str, device: str) -> None:
    rows = part("trt_rows")
    backend = "tensorrt" if device == "cuda" else "onnxruntime-cpu"
    build = rows.Build("x", target, backend)
    assert build.device == device
    text = rows.pipeline_of("fp8", build, "sm90" if device == "cuda" else None)
    assert text.count("min_gain=0.0") == 1
    assert "fp8-matmul" in text
    assert rows.pipeline_of("fp16", build, None) is None
    build_passes(text)


def test_rows_of_another_machine_are_not_kept(tmp_path: Path) -> None:
    run = part("trt_run")
    out = tmp_path / "out.json"
    options = run.options_of("doc").parse_args(["--out", str(out), "--commit", "abc"])
    results = run.opened("x", "cpu", options)
    run.rows_of(results, "t5 fp16")["a"] = {"ms": 1.0}
    results.write()
    again = run.opened("x", "cpu", options)
    assert again.content["cases"] == {"t5 fp16": {"engines": {"a": {"ms": 1.0}}}}
    run.rows_of(again, "t5 fp16")["b"] = {}
    assert set(again.content["cases"]["t5 fp16"]["engines"]) == {"a", "b"}
    other = run.options_of("doc").parse_args(["--out", str(out), "--commit", "def"])
    with pytest.raises(SystemExit, match="of another machine or commit"):
        run.opened("x", "cpu", other)


def test_times_are_compared_with_those_of_the_others() -> None:
    run = part("trt_run")
    rows: dict[str, dict[str, Any]] = {
        "tensorrt-onnx": {"ms": 2.0},
        "tensorrt-torch": {"failed": "no"},
        "onnxruntime-cuda": {"ms": 3.0},
        "torch.compile": {"ms": 5.0},
    }
    run.compare_times(rows)
    assert rows["tensorrt-onnx"] == {"ms": 2.0, "over_compiled": 2.5, "over_onnxruntime": 1.5}
    assert rows["tensorrt-torch"] == {"failed": "no"}
    assert rows["onnxruntime-cuda"]["over_onnxruntime"] == 1.0


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A fake of TensorRT, which computes with ONNX Runtime, and a stand-in for the GPU."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    use_stand_in(monkeypatch)
    install(monkeypatch, "11.0.0.114+fake")


@pytest.mark.slow
@pytest.mark.usefixtures("fake")
def test_a_row_of_a_plan_is_filled_by_way_of_the_fake(tmp_path: Path) -> None:
    models, rows = part("trt_models"), part("trt_rows")
    subject = models.subjects(small=True)[0]
    folder, case = subject.save(tmp_path / "model"), subject.case("cpu")
    reference = rows.reference_of(models.encoder(subject, folder, "cpu", torch.float32), case)
    row: dict[str, Any] = {}
    build = rows.BUILDS["tensorrt-onnx"]
    ready = rows.make_row(
        row, subject, folder, tmp_path / "out", "fp32", build, None, case, reference
    )
    assert ready is not None, row
    assert row["backend"] == "tensorrt"
    assert row["verdict"]["outcome"] == "verified"
    assert row["requires"]["tensorrt"] == "11.0.0.114+fake"
    assert [one["optimal"] for one in row["profile"]] == [(2, 16), (2, 16)]
    assert row["layers"]
    assert row["error"] < 1e-5
    assert torch.equal(ready.run(), ready.run())
    chain: dict[str, Any] = {}
    rows.chain_row(chain, subject, folder, tmp_path / "chain", build)
    assert chain["backend"] == "tensorrt"
    assert chain["engines"] == ["tensorrt", "onnxruntime"]


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


def test_outliers_of_narrow_norms_are_not_a_whole_row() -> None:
    models = part("trt_models")
    weight = {size: torch.nn.LayerNorm(size) for size in (64, 768)}
    for norm in weight.values():
        with torch.no_grad():
            norm.weight[list(models.OUTLIERS)] = 12.0
        models.tame(norm)
    assert weight[64].weight.max() == 2.0
    assert weight[768].weight.max() == 12.0
