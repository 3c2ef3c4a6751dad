"""Engines on ONNX Runtime: results, threads, tensors without copies, and refusals."""

import gc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import bundles
import ml_dtypes
import msgspec
import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from lowering import profile_ops
from onnx import TensorProto, helper, numpy_helper
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
from enginecast.runtime.bundle.reader import open_bundle
from enginecast.runtime.engine import Engine
from enginecast.runtime.load import load
from enginecast.runtime.sessions.onnxruntime import CPU_PROVIDER, OrtSession

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


def test_outputs_are_chosen_by_name(engine: Engine) -> None:
    assert list(engine.run(bundles.feeds(), outputs=["hidden"])) == ["hidden"]
    assert list(engine.run(bundles.feeds(), outputs=["hidden", "hidden"])) == ["hidden"]
    with pytest.raises(InputError, match="expected some of hidden, got none"):
        engine.run(bundles.feeds(), outputs=[])
    with pytest.raises(InputError, match="'pooled' is unknown; expected hidden"):
        engine.run(bundles.feeds(), outputs=["pooled"])


def test_threads_get_the_same_bits(engine: Engine) -> None:
    cases = [bundles.feeds(1 + turn % 4, 2 + turn % 5) for turn in range(20)]
    alone = [engine.run(case)["hidden"].tobytes() for case in cases]

    def work(_: int) -> list[bytes]:
        return [engine.run(case)["hidden"].tobytes() for case in cases * 5]

    with ThreadPoolExecutor(8) as pool:
        for together in pool.map(work, range(8)):
            assert together == alone * 5


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


def test_profile_lists_what_ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    model = bundles.write_engine(tmp_path / "model")
    ops = profile_ops(model, bundles.feeds())
    assert sorted(ops) == ["Cast", "Gather", "Mul", "Unsqueeze"]
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert sorted(path.name for path in model.parent.iterdir()) == [
        "engine.onnx",
        "weights.safetensors",
    ]


def test_kernels_that_are_slower_than_their_parts_are_left_out(tmp_path: Path) -> None:
    """ONNX Runtime would make SkipLayerNormalization and BiasGelu of these."""
    nodes = [
        helper.make_node("Add", ["x", "residual"], ["sum"]),
        helper.make_node("LayerNormalization", ["sum", "w", "b"], ["normal"], axis=-1),
        helper.make_node("Add", ["normal", "b"], ["biased"]),
        helper.make_node("Gelu", ["biased"], ["y"]),
    ]
    of = {
        name: helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", "tokens", 8])
        for name in ("x", "residual", "y")
    }
    weights = [numpy_helper.from_array(np.ones(8, np.float32), name) for name in ("w", "b")]
    graph = helper.make_graph(nodes, "g", [of["x"], of["residual"]], [of["y"]], weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10)
    onnx.save(model, tmp_path / "m.onnx")
    x = np.ones((2, 3, 8), np.float32)
    ops = profile_ops(tmp_path / "m.onnx", {"x": x, "residual": x})
    assert ops == ["Add", "LayerNormalization", "Add", "Gelu"]


def test_a_session_says_what_its_first_run_executed_where_it_was_asked_to(tmp_path: Path) -> None:
    bundle = open_bundle(bundles.make_bundle(tmp_path / "out"))
    [record] = bundle.manifest.engines
    for counts in (True, False):
        session = OrtSession.open(bundle, record, [CPU_PROVIDER], 1, counts_ops=counts)
        outputs = [output.name for output in bundle.manifest.outputs]
        for _ in range(2):
            session.run(bundles.feeds(), outputs)
        found = session.executed_ops()
        assert (found and sorted(found)) == (
            ["Cast", "Gather", "Mul", "Unsqueeze"] if counts else None
        )
