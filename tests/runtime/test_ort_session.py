"""Engines on ONNX Runtime: results, threads, tensors without copies, and refusals."""

import gc
from pathlib import Path
from typing import Any

import bundles
import ml_dtypes
import msgspec
import numpy as np
import onnxruntime
import pytest
import torch
from onnx import TensorProto
from torch.utils.dlpack import from_dlpack

from enginecast.errors import (
    BundleError,
    InputError,
    MissingError,
    UsageError,
    VerificationError,
)
from enginecast.installation import install_command
from enginecast.runtime.bundle.manifest import Output
from enginecast.runtime.engine import Engine
from enginecast.runtime.load import load

BF16 = TensorProto.BFLOAT16


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    return load(bundles.make_bundle(tmp_path / "out"))


def unary(tmp_path: Path, dtype: Any, operator: str, source: int, *args: Any, **kw: Any) -> Engine:
    result = kw.pop("result", None)
    content = bundles.unary_manifest(dtype, result)
    return load(bundles.make_unary_bundle(tmp_path / "u", content, operator, source, *args, **kw))


def expected(feeds: dict[str, Any]) -> Any:
    return bundles.table()[feeds["input_ids"]] * feeds["attention_mask"][..., None]


@pytest.mark.parametrize("shape", [(1, 2), (2, 3), (4, 6)])
def test_weights_come_from_the_safetensors_file(engine: Engine, shape: tuple[int, int]) -> None:
    feeds = bundles.feeds(*shape)
    result = engine.run(feeds)
    assert list(result) == ["hidden"]
    np.testing.assert_array_equal(result["hidden"], expected(feeds))


def test_closing_lets_runs_finish_and_refuses_new_ones(engine: Engine) -> None:
    with engine:
        result = engine.run(bundles.feeds(), as_dlpack=True)["hidden"]
    engine.close()
    with pytest.raises(UsageError, match="the engine is closed"):
        engine.run(bundles.feeds())
    del engine
    gc.collect()
    np.testing.assert_array_equal(np.from_dlpack(result), expected(bundles.feeds()))


def test_torch_tensors_in_and_out(engine: Engine) -> None:
    feeds = {name: torch.from_numpy(array) for name, array in bundles.feeds().items()}
    value = engine.run(feeds, as_dlpack=True)["hidden"]
    tensor = from_dlpack(value)
    assert tensor.data_ptr() == value.data_ptr()
    np.testing.assert_array_equal(tensor.numpy(), expected(bundles.feeds()))


def test_bfloat16_in_and_out(tmp_path: Path) -> None:
    engine = unary(tmp_path, "bfloat16", "Identity", BF16)
    tensor = torch.tensor([[1.5, -2.0, 3e38]]).bfloat16()
    array = engine.run({"x": tensor})["y"]
    assert array.dtype == ml_dtypes.bfloat16
    again = engine.run({"x": array}, as_dlpack=True)["y"]
    assert torch.equal(from_dlpack(again), tensor)


@pytest.mark.parametrize("as_dlpack", [False, True])
@pytest.mark.parametrize(
    ("dtype", "source"), [("float32", TensorProto.FLOAT), ("float16", TensorProto.FLOAT16)]
)
def test_non_finite_outputs_are_refused(
    tmp_path: Path, dtype: str, source: int, as_dlpack: bool
) -> None:
    engine = unary(tmp_path, dtype, "Reciprocal" if dtype == "float32" else "Sqrt", source)
    bad = 0 if dtype == "float32" else -1
    feeds = {"x": np.array([[1, bad, 1], [bad, 1, 1]], dtype)}
    with pytest.raises(VerificationError, match=r"output 'y': .* got 2 of 6 .* at \[0, 1\]"):
        engine.run(feeds, as_dlpack=as_dlpack)
    result = engine.run(feeds, as_dlpack=as_dlpack, check_finite=False)["y"]
    assert not np.isfinite(np.asarray(result)).all()


def test_a_provider_that_is_not_there(tmp_path: Path) -> None:
    root = bundles.make_bundle(tmp_path / "out")
    with pytest.raises(MissingError, match="OpenVINOExecutionProvider: not in this") as caught:
        load(root, providers=["OpenVINOExecutionProvider"])
    assert "CPUExecutionProvider" in caught.value.message
    assert install_command("cuda") in caught.value.hint


def test_a_silent_fallback_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    available = ["CUDAExecutionProvider", "CPUExecutionProvider"]
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: available)
    original = onnxruntime.InferenceSession

    def on_cpu(path: str, options: Any, providers: list[str]) -> Any:
        assert providers == available
        return original(path, options, providers=["CPUExecutionProvider"])

    monkeypatch.setattr(onnxruntime, "InferenceSession", on_cpu)
    root = bundles.make_bundle(tmp_path / "out")
    with pytest.raises(MissingError, match=r"CUDAExecutionProvider: asked for, but .* fell back"):
        load(root, device="cuda")


def test_bf16_engines_do_not_load_on_cpu(tmp_path: Path) -> None:
    record = bundles.engine(precision="bf16")
    root = bundles.make_bundle(tmp_path / "out", bundles.manifest(engines=(record,)))
    with pytest.raises(MissingError, match="no bf16 kernels") as caught:
        load(root)
    assert "CUDA" in caught.value.hint
    assert "--precision fp32 or fp16" in caught.value.hint


@pytest.mark.parametrize(
    ("installed", "minimum", "fine"),
    [
        ("1.31.1", "onnxruntime>=1.28", True),
        ("1.9.0", "onnxruntime>=1.28", False),
        ("1.28.0.dev20260101", "onnxruntime>=1.28.0", True),
        ("1.27.9", "onnxruntime>=1.28", False),
        ("1.0", "", True),
    ],
)
def test_minimum_runtime(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, installed: str, minimum: str, fine: bool
) -> None:
    record = bundles.engine(minimum_runtime=minimum)
    root = bundles.make_bundle(tmp_path / "out", bundles.manifest(engines=(record,)))
    monkeypatch.setattr(onnxruntime, "__version__", installed)
    if fine:
        load(root)
        return
    with pytest.raises(MissingError, match=f"expected {minimum}, got onnxruntime {installed}"):
        load(root)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"inputs": bundles.manifest().inputs[:1]}, r"inputs: the manifest says .*attention_mask"),
        ({"outputs": (Output(name="pooled", dtype="float32", shape=(3,)),)}, "outputs: .*pooled"),
        ({"outputs": (Output(name="hidden", dtype="float16", shape=(3,)),)}, "outputs: .*float16"),
    ],
)
def test_a_file_that_is_not_what_the_manifest_says(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    root = bundles.make_bundle(tmp_path / "out", bundles.manifest(**changes))
    with pytest.raises(BundleError, match=message):
        load(root)


def test_a_failing_run_names_the_shapes_and_prints_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    ids, mask = bundles.manifest().inputs
    open_ended = msgspec.structs.replace(ids, maximum=None)
    content = bundles.manifest(inputs=(open_ended, mask))
    engine = load(bundles.make_bundle(tmp_path / "out", content))
    feeds = bundles.feeds() | {"input_ids": np.full((2, 3), 1000)}
    with pytest.raises(InputError, match=r"engine\.onnx: failed on input_ids \[2, 3\]"):
        engine.run(feeds)
    assert capfd.readouterr() == ("", "")
