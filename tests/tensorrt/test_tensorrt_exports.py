"""`--target tensorrt` from the command line to a run, with the fake of TensorRT and a CPU stand-in.

What passes here proves the calls and the way of the data; nothing of it ran on TensorRT.
"""

import json
from pathlib import Path

import numpy as np
import pytest
from cpu_stand_in import use_stand_in
from exports import Exports, cast
from fake_tensorrt import FakeTensorRT, install

from enginecast.exporters.tensorrt import lower as exporter
from enginecast.exporters.tensorrt.build import Job
from enginecast.runtime.bundle.tensor_files import read_tensors


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeTensorRT:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    use_stand_in(monkeypatch)
    return install(monkeypatch, "11.0.0.114+fake")


@pytest.mark.slow
def test_a_plan_and_an_engine_beside_it(
    exports: Exports, fake: FakeTensorRT, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, bundle = exports.model("t5"), tmp_path / "out"
    ran = cast(
        capsys,
        *("export", model, "-o", bundle, "--target", "tensorrt", "--also", "onnxruntime"),
        *(
            "--target-option",
            "opt-shape=input_ids=2x16",
            "--target-option",
            "opt-shape=attention_mask=2x16",
            "--json",
        ),
    )
    assert ran.code == 0, ran.err
    reported = ran.json
    assert reported["outcome"] == "verified"
    assert [(one["target"], one["outcome"]) for one in reported["engines"]] == [
        ("tensorrt", "verified"),
        ("onnxruntime", "verified"),
    ]
    assert reported["layers"]
    assert {path.name for path in bundle.iterdir()} >= {
        "engine.plan",
        "engine.onnx",
        "weights.safetensors",
    }
    first, second = json.loads((bundle / "manifest.json").read_text("utf-8"))["engines"]
    assert first["requires"]["tensorrt"] == "11.0.0.114+fake"
    assert first["verdict"]["where"]["provider"] == "tensorrt"
    assert first["verdict"]["where"]["versions"]["tensorrt"] == "11.0.0.114+fake"
    assert [row["optimal"] for row in first["profile"]] == [[2, 16], [2, 16]]
    assert second["file"] == "engine.onnx"

    checked = cast(capsys, "verify", bundle, "--device", "cuda", "--allow-code", "--json")
    assert checked.code == 0, checked.err
    assert checked.json["backend"] == "tensorrt"
    assert checked.json["layers"] == reported["layers"]

    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a cat\nthe quick brown fox\n", encoding="utf-8")
    results = {}
    for backend in ("tensorrt", "onnxruntime-cpu"):
        output = tmp_path / f"{backend}.safetensors"
        run = cast(
            capsys,
            *("run", bundle, "--prompts", prompts, "-o", output, "--prefer", backend),
            *("--allow-code", "--json"),
        )
        assert run.code == 0, run.err
        assert run.json["backend"] == backend
        results[backend] = read_tensors(output)["last_hidden_state"]
    by_plan, by_engine = results.values()
    np.testing.assert_allclose(by_plan, by_engine, rtol=1e-4, atol=1e-5)

    shown = cast(capsys, "inspect", bundle).out
    assert "for tensorrt on tensorrt; judged with tensorrt of tensorrt 11.0.0.114+fake" in shown
    assert "input_ids 1x1 .. " in shown
    assert "tuned for 2x16" in shown


def test_a_plan_that_computes_something_else_is_rejected(
    exports: Exports,
    fake: FakeTensorRT,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Engine and eager are compared, whatever was built of the network."""
    write = exporter.write_network

    def spoiled(job: Job, folder: Path) -> exporter.Network:
        made = write(job, folder)
        # Where they are: the graph knows the weights by their places in the file.
        content = bytearray((folder / made.files[1]).read_bytes())
        start = 8 + int.from_bytes(content[:8], "little")
        weights = np.frombuffer(content, np.float32, offset=start)
        weights *= 1.02
        (folder / made.files[1]).write_bytes(content)
        return made

    monkeypatch.setattr(exporter, "write_network", spoiled)
    ran = cast(
        capsys, "export", exports.model("vit"), "-o", tmp_path / "out", "--target", "tensorrt"
    )
    assert ran.code == 1
    assert not (tmp_path / "out").exists()
    assert (tmp_path / "out.rejected").is_dir()


def test_an_op_that_its_parser_lacks_is_named(
    fake: FakeTensorRT, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "kernel_factory.py").write_text(
        "import torch\n"
        "class Unique(torch.nn.Module):\n"
        "    def forward(self, x):\n"
        "        return torch.bitwise_xor(x, 3)\n"
        "def make(): return Unique(), {'x': torch.arange(6)}\n",
        encoding="utf-8",
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        ran = cast(capsys, "export", "kernel_factory:make", "-o", "out", "--target", "tensorrt")
    assert ran.code == 2
    assert "BitwiseXor" in ran.err
    assert "kernel_factory.py:4" in ran.err
    assert not (tmp_path / "out").exists()
