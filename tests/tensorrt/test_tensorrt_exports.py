"""`--target tensorrt-rtx` from the command line to a bundle, with the real TensorRT-RTX."""

import contextlib
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from exports import Exports, cast
from rtx import trt

from enginecast.exporters.tensorrt import lower as exporter
from enginecast.exporters.tensorrt.build import Job

Capture = pytest.CaptureFixture[str]
TARGET = ("--target", "tensorrt-rtx")
VERSION = f"TensorRT-RTX {trt.__version__}"


def profile(shapes: str) -> tuple[str, str]:
    return "--profile", f"input_ids={shapes};attention_mask={shapes}"


def engine_of(bundle: Path) -> Any:
    (found,) = json.loads((bundle / "manifest.json").read_text("utf-8"))["engines"]
    return found


def test_a_text_encoder_of_two_profiles(exports: Exports, tmp_path: Path, capsys: Capture) -> None:
    bundle = tmp_path / "out"
    ran = cast(
        capsys,
        *("export", exports.model("t5"), "-o", bundle, *TARGET, "--precision", "fp16", "--json"),
        *("--compute", "8.6,8.9", *profile("1x1,1x8,1x16"), *profile("2x24,2x24,4x32")),
    )
    assert ran.code == 0, ran.err
    assert ran.json["outcome"] == "verified-by-emulation"
    names = {path.name for path in bundle.iterdir()}
    assert "engine.plan" in names
    assert not {"network.onnx", "network.safetensors", "engine.onnx"} & names
    made = engine_of(bundle)
    assert made == made | {
        "target": "tensorrt-rtx",
        "built_by": VERSION,
        "minimum_runtime": f"tensorrt-rtx=={trt.__version__}",
        "requires": {"tensorrt-rtx": trt.__version__, "compute": "8.6 8.9"},
        "network": None,
        "weights": None,
    }
    assert [(row["name"], row["profile"], row["greatest"]) for row in made["profile"]] == [
        ("input_ids", 0, [1, 16]),
        ("attention_mask", 0, [1, 16]),
        ("input_ids", 1, [4, 32]),
        ("attention_mask", 1, [4, 32]),
    ]
    assert "sequence: 17..23 are in no profile" in ran.err
    notes = json.loads((bundle / "manifest.json").read_text("utf-8"))["notes"]
    assert "sequence: 17..23 are in no profile" in notes
    assert made["verdict"]["engine"] == "not run on target"
    assert {
        "the engine file ran on CPUExecutionProvider with its 16-bit values in fp32",
        f"parsed and built by {VERSION}",
    } <= {*made["verdict"]["reasons"]}
    log = (bundle / "build.log").read_text("utf-8")
    assert re.search(rf"\n{VERSION}: \d+ layers, 2 profiles, built in \d+\.\d\d s\n", log)
    assert "\nlayers of encoder.block.0.layer.0.SelfAttention.q: 1\n" in log

    shown = cast(capsys, "inspect", bundle).out
    assert f"asks for compute 8.6 8.9, tensorrt-rtx {trt.__version__}" in shown
    assert "input_ids 1x1 .. 1x16, tuned for 1x8" in shown
    assert "input_ids 2x24 .. 4x32, tuned for 2x24" in shown
    if not torch.cuda.is_available():
        for command in (("verify", bundle), ("bench", bundle)):
            ran = cast(capsys, *command, "--allow-code")
            assert ran.code == 3
            assert "engine.plan: device cuda: torch sees no CUDA GPU here" in ran.err


def test_a_network_that_computes_something_else_is_rejected(
    exports: Exports, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, out = exporter.write_network, tmp_path / "out"

    def spoiled(job: Job, folder: Path) -> exporter.Network:
        made = write(job, folder)
        content = bytearray((folder / made.files[1]).read_bytes())
        start = 8 + int.from_bytes(content[:8], "little")
        weights = np.frombuffer(content, np.float32, offset=start)
        weights *= 1.02
        (folder / made.files[1]).write_bytes(content)
        return made

    monkeypatch.setattr(exporter, "write_network", spoiled)
    ran = cast(capsys, "export", exports.model("vit"), "-o", out, *TARGET, "--json")
    assert ran.code == 1
    assert not out.exists()
    assert (tmp_path / "out.rejected").is_dir()


def test_fp8_weights_of_a_clip_encoder(exports: Exports, tmp_path: Path, capsys: Capture) -> None:
    bundle = tmp_path / "out"
    ran = cast(
        capsys,
        *("export", exports.model("family-clip-text"), "-o", bundle, *TARGET, "--arch", "sm89"),
        *("--precision", "fp8-storage", "--max-error", "0.5", "--json"),
    )
    assert ran.code == 0, ran.err
    made = engine_of(bundle)
    assert (made["quantized"], made["requires"]["compute"]) == ("fp8", "8.9")
    assert f"parsed and built by {VERSION}" in made["verdict"]["reasons"]


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        (("--compute", "9.0"), 2, "--compute 9.0: TensorRT-RTX builds for 7.5, 8.0, 8.6, 8.9, 12."),
        (("--arch", "sm90"), 2, "--arch sm90: TensorRT-RTX builds for 7.5, 8.0, 8.6, 8.9, 12.0"),
        (("--compute", "8.6", "--arch", "sm89"), 2, "--compute 8.6: --arch sm89 is 8.9"),
        (("--strip-weights",), 3, f"--strip-weights: {VERSION} compiles what fills the weights in"),
        (("--target-option", "refit=true"), 3, "--target-option refit=true: TensorRT-RTX"),
        (("--profile", "input_ids=1x1"), 2, "expected NAME=1x16,4x64,8x256"),
        (("--profile", "input_ids=1x8,1x4,2x9"), 2, "of which none has a greater size than the"),
        (("--target-option", "level=3"), 2, "level=3: --target tensorrt-rtx has no option 'level'"),
    ],
)
def test_what_is_refused_before_the_model_is_read(
    options: tuple[str, ...],
    code: int,
    said: str,
    exports: Exports,
    tmp_path: Path,
    capsys: Capture,
) -> None:
    if code == 3 and torch.cuda.is_available():
        pytest.skip("a GPU fills weights in")
    ran = cast(capsys, "export", exports.model("vit"), "-o", tmp_path / "out", *TARGET, *options)
    assert (ran.code, said in ran.err, "capture" in ran.err) == (code, True, False), ran.err


def test_an_op_that_its_parser_lacks_is_named(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "xor_factory.py").write_text(
        "import torch\n"
        "class Xor(torch.nn.Module):\n"
        "    def forward(self, x):\n"
        "        return torch.bitwise_xor(x, 3)\n"
        "def make(): return Xor(), {'x': torch.arange(6)}\n",
        encoding="utf-8",
    )
    with contextlib.chdir(tmp_path):
        ran = cast(capsys, "export", "xor_factory:make", "-o", "out", *TARGET)
    assert ran.code == 2
    assert "BitwiseXor" in ran.err
    assert "xor_factory.py:4" in ran.err
    assert not (tmp_path / "out").exists()


def test_what_profiles_and_state_are_said_to_be(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "sums_factory.py").write_text(
        "import torch\n"
        "class Sums(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.register_buffer('sum', torch.zeros(4))\n"
        "    def forward(self, x):\n"
        "        self.sum += x.sum(0).tanh()\n"
        "        return self.sum * 0.5\n"
        "def make(): return Sums(), {'x': torch.ones(3, 4)}\n",
        encoding="utf-8",
    )
    export = ("export", "sums_factory:make", "-o", "out", *TARGET, "--stateful")
    with contextlib.chdir(tmp_path):
        ran = cast(capsys, *export, "--dynamic", "x:0=1..9", "--profile", "x=2x4,2x4,8x4")
        assert (ran.code, "lower" in ran.err) == (2, False)
        assert "--profile: batch from 2 to 8, and --dynamic has it from 1 to 9, which" in ran.err
        ran = cast(capsys, *export, "--profile", "x=2x4,2x4,8x4")
    assert ran.code == 0, ran.err
    assert re.search(r"8 consecutive calls match .*; what ran is the network, in fp32", ran.out)
