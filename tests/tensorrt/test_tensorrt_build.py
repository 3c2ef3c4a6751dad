"""What the real TensorRT-RTX makes of our networks: it parses and builds without a GPU."""

import os
import re
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rtx
import torch
from msgspec.structs import replace
from quantized_programs import FP8, quantized
from rtx import trt
from tensorrt_graphs import E4M3, FLOAT, HALF, INT64
from tensorrt_networks import network_of

from enginecast.errors import LoweringError, MissingError, UsageError
from enginecast.exporters.onnx.metadata import MODULE
from enginecast.exporters.registry import target_of
from enginecast.exporters.target import Artifact
from enginecast.exporters.tensorrt import lower as exporter
from enginecast.exporters.tensorrt.build import built_for
from enginecast.exporters.tensorrt.lower import (
    NETWORK_FILE,
    NETWORK_WEIGHTS_FILE,
    PLAN_FILE,
    let_attentions_decompose,
    require_library,
)
from enginecast.exporters.tensorrt.options import TensorRTRTXOptions
from enginecast.runtime.sessions.tensorrt.errors import Messages, error_logger
from enginecast.runtime.sessions.tensorrt.library import RTX

VERSION = f"TensorRT-RTX {trt.__version__}"
FILES = [PLAN_FILE, NETWORK_FILE, NETWORK_WEIGHTS_FILE]


@pytest.fixture(scope="module")
def lowered(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Artifact]:
    """The small program as an engine, for every test that changes nothing."""
    folder = tmp_path_factory.mktemp("small")
    return folder, rtx.lower(folder)


def test_a_plain_build(lowered: tuple[Path, Artifact]) -> None:
    folder, made = lowered
    assert made.files == (PLAN_FILE,)
    assert made.only_here == (NETWORK_FILE, NETWORK_WEIGHTS_FILE)
    assert sorted(path.name for path in folder.iterdir()) == sorted(FILES)
    assert made.requires == {"tensorrt-rtx": trt.__version__, "compute": "8.0 8.6 8.9 12.0+"}
    assert [(one.profile, one.least, one.greatest) for one in made.record["profile"]] == [
        (0, (1, 2, 16), (1, 8, 16)),
        (1, (1, 2, 16), (1, 32, 16)),
        (2, (1, 2, 16), (8, 32, 16)),
    ]
    assert made.ops["Attention"] == made.ops["RMSNormalization"] == 1
    written = (folder / NETWORK_FILE).read_bytes()
    assert MODULE.encode() in written
    assert b"rtx.py" not in written  # lines of the user's code are for messages
    first, *lines = made.log
    assert re.fullmatch(rf"{VERSION}: \d+ layers, 3 profiles, built in \d+\.\d\d s", first)
    assert {"layers of norm: 6", "layers of narrow: 2"} <= set(lines)
    assert any(line.startswith("layers added by the parser: ") for line in lines)


def test_its_network_computes_what_eager_does(lowered: tuple[Path, Artifact]) -> None:
    """In the engine's place, which nothing runs here."""
    session = target_of("tensorrt-rtx").open_twin(lowered[0] / PLAN_FILE, 1)
    assert session is not None
    x = torch.randn(2, 9, rtx.WIDTH)
    with torch.no_grad():
        wanted = rtx.program()[0](x)
    found = session.run({"x": x.numpy()}, ["out"])["out"]
    np.testing.assert_allclose(np.asarray(found), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_value_has_the_dtype_of_the_graph(dtype: torch.dtype, tmp_path: Path) -> None:
    network_of(rtx.program(dtype)[1], tmp_path)
    _, network = rtx.network()
    parser = trt.OnnxParser(network, error_logger(trt, Messages()))
    assert parser.parse_from_file(str(tmp_path / NETWORK_FILE))
    layers = [network.get_layer(index) for index in range(network.num_layers)]
    kinds = Counter(layer.type.name for layer in layers)
    assert (kinds["MATRIX_MULTIPLY"], kinds["ATTENTION_OUTPUT"]) == (2, 1)
    assert let_attentions_decompose(trt, network) == 1
    found = {one.get_output(0).dtype for one in layers}
    assert found & {*rtx.FLOATS.values()} == {rtx.FLOATS[dtype], trt.float32}
    wide = [one for one in layers if one.get_output(0).dtype == trt.float32]
    assert {one.metadata for one in wide if one.metadata} == {"[ONNX Layer: node_rms_norm]"}


def test_an_attention_that_may_not_be_taken_apart_is_not_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(exporter, "let_attentions_decompose", lambda *_: 0)
    with pytest.raises(LoweringError, match=r"cannot build .* may be marked as decomposable"):
        rtx.lower(tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert capfd.readouterr().out == ""


ADD = "(float16[2, 4] x, float[2, 4] z) => (float16[2, 4] y) { y = Add(x, z) }"
XOR = "(int64[4] x) => (int64[4] y) { y = BitwiseXor(x, x) }"
RANK = "(float[2, 4] x) => (float[2, 1, 1, 1, 1, 1, 1, 1, 4] y) { y = Unsqueeze(x, n) }"
TOP = "(float[2, 4000] x) => (float[2, k] y, int64[2, k] z) { y, z = TopK(x, n) }"
PLACE = f"{VERSION} does not take this network: {{}} 'node_y' of layer.1 (model.py:12): "


@pytest.mark.parametrize(
    ("text", "constant", "said"),
    [
        (ADD, None, f"{PLACE.format('Add')}Invalid Node - node_y ITensor::getDimensions: Error"),
        (ADD, None, "ElementWiseOperation SUM must have same input types. But they are of types"),
        (XOR, None, f"{PLACE.format('BitwiseXor')}unsupported node"),
        (RANK, [*range(1, 8)], f"{PLACE.format('Unsqueeze')}Invalid Node - node_y ITensor"),
        (RANK, [*range(1, 8)], "a tensor with rank greater than Dims::MAX_DIMS"),
        (TOP, [3841], f"{VERSION} cannot build this engine: IBuilder::buildSerializedNetwork: "),
        (TOP, [3841], "K exceeds the maximum value allowed (3840)"),
    ],
)
def test_a_refusal_is_the_library_s_own_with_module_and_line(
    text: str, constant: Any, said: str, tmp_path: Path
) -> None:
    with pytest.raises(LoweringError) as caught:
        rtx.build(text, tmp_path, {"n": (constant, INT64)} if constant else None)
    assert said in caught.value.message
    assert "cudaError" not in caught.value.message  # of the driver that is not here
    assert caught.value.exit_code == 2


VARIES = "(float[batch, 4] x) => (float[batch, 4] y) { y = Relu(x) }"


def test_profiles_with_a_gap_are_built(tmp_path: Path) -> None:
    profiles = [("x", (1, 4), (1, 4), (2, 4)), ("x", (8, 4), (8, 4), (16, 4))]
    assert rtx.build(VARIES, tmp_path, profiles=profiles).content.nbytes > 0


@pytest.mark.parametrize(
    ("profile", "said"),
    [
        (
            ("x", (4, 4), (2, 4), (8, 4)),
            r"TensorRT-RTX refuses profile 0 of the inputs: .* MIN<=OPT<=MAX",
        ),
        (("z", (1, 4), (2, 4), (8, 4)), r"input tensor x is missing dimensions in profile 0"),
    ],
)
def test_a_profile_that_cannot_be(profile: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(LoweringError, match=said) as caught:
        rtx.build(VARIES, tmp_path, profiles=[profile])
    assert "cudaError" not in caught.value.message


BF16 = "(bfloat16[2, 4] x) => (bfloat16[2, 4] y) { y = Relu(x) }"
FP32 = "(float[2, 4] x) => (float[2, 4] y) { y = MatMul(x, v) }"
STORED = "(float16[2, 4] x) => (float16[2, 4] y) { d = DequantizeLinear(w, s) y = MatMul(x, d) }"
WEIGHT = {"w": ([[1.0] * 4] * 4, E4M3), "v": ([[1.0] * 4] * 4, FLOAT), "s": (0.5, HALF)}


@pytest.mark.parametrize(
    ("text", "compute", "lacks"),
    [
        (FP32, "7.5", r"Cannot compile operation 'node_y' for Turing \(SM75\): FP32 GEMM is not"),
        (BF16, "7.5", r"for target\(s\) sm75, because .* HW-specific datatypes: b16"),
        (STORED, "8.6", r"for target\(s\) sm86, because .* HW-specific datatypes: fp8_e4m3"),
    ],
)
def test_a_gpu_that_lacks_a_dtype(text: str, compute: str, lacks: str, tmp_path: Path) -> None:
    with pytest.raises(LoweringError, match=lacks):
        rtx.build(text, tmp_path, WEIGHT, compute=(compute,))
    assert rtx.build(text, tmp_path, WEIGHT, compute=("8.9", "12.0")).content.nbytes > 0


def test_an_fp8_engine_is_not_for_gpus_without_it(tmp_path: Path) -> None:
    stored = quantized(rtx.program(torch.float16)[1], "storage", FP8)
    made = rtx.lower(tmp_path, program=stored, inputs=[replace(rtx.X, dtype="float16")])
    assert (made.quantized, made.requires["compute"]) == ("fp8", "8.9 12.0+")


KNOWN = "TensorRT-RTX builds for 7.5, 8.0, 8.6, 8.9, 12.0, 12.1"


@pytest.mark.parametrize(
    ("compute", "arch", "found"),
    [
        ((), None, ()),
        ((), "sm89", ("8.9",)),
        (("8.6", "12.0"), "sm86", ("8.6", "12.0")),
        (("9.0",), None, f"--compute 9.0: {KNOWN}"),
        ((), "sm90", f"--arch sm90: {KNOWN}"),
        (("8.6", "8.9"), "sm89", "--compute 8.6,8.9: --arch sm89 is 8.9, and the oldest of them"),
    ],
)
def test_compute_capabilities(compute: tuple[str, ...], arch: str | None, found: Any) -> None:
    options = TensorRTRTXOptions(compute=compute)
    if isinstance(found, tuple):
        assert built_for(trt, options, arch) == found
        return
    with pytest.raises(UsageError) as caught:
        built_for(trt, options, arch)
    assert caught.value.message.startswith(found)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU fills weights in")
@pytest.mark.parametrize(
    ("options", "named"),
    [({"strip_weights": True}, "--strip-weights"), ({"refit": True}, "--target-option refit=true")],
)
def test_weights_that_come_later_need_a_gpu(options: dict[str, Any], named: str) -> None:
    said = f"{named}: {VERSION} compiles what fills the weights in on a GPU"
    with pytest.raises(MissingError, match=said) as caught:
        require_library(RTX, TensorRTRTXOptions(**options))
    assert caught.value.exit_code == 3


@pytest.mark.parametrize("stop", [KeyboardInterrupt(), ValueError("a defect"), None])
def test_a_build_is_stopped_after_its_step(stop: BaseException | None, tmp_path: Path) -> None:
    """By what a listener raises, or by Ctrl-C; another build goes on in the same process."""
    told: list[str] = []

    def tell(phase: str, done: int, total: int) -> None:
        told.append(phase)
        if done == 1 and stop is not None:
            raise stop
        if done == 1:
            os.kill(os.getpid(), signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(type(stop or KeyboardInterrupt())):
        rtx.lower(tmp_path, tell=tell)
    assert signal.getsignal(signal.SIGINT) is before
    assert set(told) == {"Building engine", "Cloning network graph"}
    assert list(tmp_path.iterdir()) == []
    assert rtx.build(VARIES.replace("batch", "2"), tmp_path).warnings == ()
