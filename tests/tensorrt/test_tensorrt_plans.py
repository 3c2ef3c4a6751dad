"""Which plans are read, and which are refused: with the fake of TensorRT and a CPU stand-in."""

import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import tensorrt_bundles as small
import torch
from bundles import engine as onnx_record
from cpu_stand_in import use_stand_in
from fake_tensorrt import FakeTensorRT, install
from onnx import TensorProto

from enginecast.errors import BundleError, MissingError, UsageError
from enginecast.runtime.bundle.manifest import Input, Output, ShapeRange
from enginecast.runtime.engine import Engine
from enginecast.runtime.load import load

STRIPPED: dict[str, Any] = {"network": "network.onnx", "weights": "network.safetensors"}


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeTensorRT:
    use_stand_in(monkeypatch)
    return install(monkeypatch, "11.0.0.114+fake")


def opened(root: Path, files: dict[str, bytes], *, content: Any = None, **changes: Any) -> Engine:
    content = content or small.manifest(small.record(**changes))
    small.publish(root / "out", files, content)
    return load(root / "out", device="cuda", allow_code=True)


def refused(root: Path, plan: bytes, **changes: Any) -> str:
    with pytest.raises(BundleError) as caught:
        opened(root, {"engine.plan": plan}, **changes)
    return caught.value.message


def test_a_plan_that_was_cut_off(tmp_path: Path, fake: FakeTensorRT) -> None:
    message = refused(tmp_path, small.plan(fake)[:-9])
    assert message.startswith("engine.plan: TensorRT refuses the plan: IRuntime::deserialize")
    assert "the plan is cut off in its network" in message


def test_a_plan_of_no_bytes(tmp_path: Path, fake: FakeTensorRT) -> None:
    assert refused(tmp_path, b"") == "engine.plan: TensorRT refuses the plan: it gave no reason"


def test_a_plan_that_is_none(tmp_path: Path, fake: FakeTensorRT) -> None:
    assert "this is not a plan of the fake TensorRT" in refused(tmp_path, b"ftrt" * 50)


def test_a_plan_that_was_edited_is_not_seen_by_tensorrt(tmp_path: Path, fake: FakeTensorRT) -> None:
    opened(tmp_path, {"engine.plan": small.plan(fake)}).close()
    path = tmp_path / "out" / "engine.plan"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    fake.calls.clear()
    for check in ("full", "size"):
        with pytest.raises(BundleError, match=r"engine\.plan has sha256"):
            load(tmp_path / "out", device="cuda", allow_code=True, check=check)
    assert fake.calls == []


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"tensorrt": "10.15.1.29"}, "built with TensorRT 10.15.1.29, and here is 11.0.0.114+fake"),
        ({"gpu": "sm89", "gpu_name": "NVIDIA L4"}, "built for NVIDIA L4 (sm89), and here is NVIDI"),
        ({"driver": "590.1"}, "built with driver 590.1, and here is 580.95.05"),
        ({"pirate": "yes"}, "asks for pirate yes, which this enginecast does not know"),
    ],
)
def test_a_plan_for_another_machine_is_not_seen_by_tensorrt(
    tmp_path: Path, fake: FakeTensorRT, changed: dict[str, str], sentence: str
) -> None:
    with pytest.raises(MissingError) as caught:
        opened(tmp_path, {"engine.plan": small.plan(fake)}, requires=small.REQUIRES | changed)
    assert sentence in caught.value.message
    assert "--also onnxruntime" in caught.value.hint
    assert fake.calls == []


def test_what_would_load_instead_is_named(tmp_path: Path, fake: FakeTensorRT) -> None:
    foreign = small.record(requires=small.REQUIRES | {"cuda": "12"})
    other = onnx_record(weights=None)
    files = {"engine.plan": small.plan(fake), "engine.onnx": small.network().SerializeToString()}
    small.publish(tmp_path / "out", files, small.manifest(foreign, other))
    with pytest.raises(MissingError) as caught:
        load(tmp_path / "out", prefer=["tensorrt"], allow_code=True)
    assert "built for CUDA 12, and here is CUDA 13" in str(caught.value)
    assert "engine.onnx of this bundle is for ONNX Runtime" in str(caught.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = install(monkeypatch)
    with pytest.raises(MissingError, match=r"^engine\.plan: device cuda: torch sees no") as caught:
        opened(tmp_path, {"engine.plan": small.plan(fake)})
    assert caught.value.hint.startswith("See `enginecast doctor`. Nothing else is in this bundle")


def test_without_tensorrt(tmp_path: Path, fake: FakeTensorRT, monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    with pytest.raises(MissingError, match=r"^engine\.plan: a TensorRT engine needs tensorrt"):
        opened(tmp_path, {"engine.plan": small.plan(fake)})


def test_tensorrt_does_not_start(tmp_path: Path, fake: FakeTensorRT, monkeypatch: Any) -> None:
    def refuse(self: object, logger: object) -> None:
        raise TypeError("pybind11::init(): factory function returned nullptr")

    monkeypatch.setattr(fake.Runtime, "__init__", refuse)
    with pytest.raises(
        MissingError, match=r"^engine\.plan: TensorRT 11\.0\.0\.114.* create a runtime"
    ):
        opened(tmp_path, {"engine.plan": small.plan(fake)})


def test_outputs_that_are_numbered_are_taken_in_order(tmp_path: Path, fake: FakeTensorRT) -> None:
    """As torch_tensorrt calls them."""
    model = small.network()
    for number, output in enumerate(model.graph.output):
        model.graph.node.add(
            op_type="Identity", input=[output.name], output=[f"output{number}"], name=f"i{number}"
        )
        output.name = f"output{number}"
    plan = small.plan(fake, network=model.SerializeToString())
    feeds = small.feeds()
    with opened(tmp_path, {"engine.plan": plan}) as engine:
        found = engine.run(feeds)
    np.testing.assert_allclose(found["y"], small.wanted(**feeds), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found["total"], found["y"].sum(), rtol=1e-5)


def test_the_cpu_runs_none(tmp_path: Path, fake: FakeTensorRT) -> None:
    opened(tmp_path, {"engine.plan": small.plan(fake)}).close()
    with pytest.raises(UsageError, match="TensorRT engines run on a GPU"):
        load(tmp_path / "out", allow_code=True)


@pytest.mark.parametrize("compatible", ["yes", "no"])
def test_code_of_the_host_is_allowed_to_compatible_plans_alone(
    tmp_path: Path, fake: FakeTensorRT, compatible: str
) -> None:
    flags = ("VERSION_COMPATIBLE",) if compatible == "yes" else ()
    requires = small.REQUIRES | {"version_compatible": compatible}
    opened(tmp_path, {"engine.plan": small.plan(fake, flags=flags)}, requires=requires).close()
    (said,) = fake.called("Runtime.engine_host_code_allowed=")
    assert said == {"value": compatible == "yes"}
    assert len(fake.called("Runtime.error_recorder=")) == 1


def test_a_plan_that_hides_code_of_the_host_is_refused(tmp_path: Path, fake: FakeTensorRT) -> None:
    plan = small.plan(fake, flags=("VERSION_COMPATIBLE",))
    assert "engine_host_code_allowed is not set" in refused(tmp_path, plan)


def test_what_tensorrt_says_is_in_the_error_once(tmp_path: Path, fake: FakeTensorRT) -> None:
    fake.failures.deserialize = "Error Code 6:\n  the plan is of another world"
    message = refused(tmp_path, small.plan(fake))
    assert message == (
        "engine.plan: TensorRT refuses the plan: Error Code 6: the plan is of another world"
    )


def test_weights_are_filled_in_before_the_first_run(tmp_path: Path, fake: FakeTensorRT) -> None:
    files = {"engine.plan": small.stripped_plan(fake), **small.network_files()}
    with opened(tmp_path, files, **STRIPPED) as engine:
        names = [call.name for call in fake.calls]
        refit = names.index("Refitter.refit_cuda_engine")
        assert refit < names.index("ICudaEngine.create_execution_context")
        feeds = small.feeds()
        found = engine.run(feeds)["y"]
    np.testing.assert_allclose(found, small.wanted(**feeds), rtol=1e-5, atol=1e-6)


def test_weights_that_are_missing_are_named(tmp_path: Path, fake: FakeTensorRT) -> None:
    files = {"engine.plan": small.stripped_plan(fake), **small.network_files(leave_out="w")}
    with pytest.raises(BundleError) as caught:
        opened(tmp_path, files, **STRIPPED)
    assert caught.value.message == (
        "engine.plan: TensorRT cannot fill in the weights of network.onnx: 1 weights are missing: w"
    )


def test_a_network_that_cannot_be_read(tmp_path: Path, fake: FakeTensorRT) -> None:
    broken = {**small.network_files(), "network.onnx": b"\xff no model"}
    with pytest.raises(
        BundleError, match=r"network\.onnx: the model: expected a field of ModelProto"
    ):
        opened(tmp_path, {"engine.plan": small.stripped_plan(fake), **broken}, **STRIPPED)


def test_a_plan_without_weights_and_without_a_network(tmp_path: Path, fake: FakeTensorRT) -> None:
    message = refused(tmp_path, small.stripped_plan(fake))
    assert message.startswith("engine.plan: the plan holds no weights, and the manifest names no")


def test_a_plan_that_cannot_be_filled(tmp_path: Path, fake: FakeTensorRT) -> None:
    files = {"engine.plan": small.plan(fake), **small.network_files()}
    with pytest.raises(BundleError, match="expected a plan whose weights can be filled in"):
        opened(tmp_path, files, **STRIPPED)


def test_a_tensor_in_cpu_memory(tmp_path: Path, fake: FakeTensorRT, monkeypatch: Any) -> None:
    monkeypatch.setattr(fake.ICudaEngine, "get_tensor_location", lambda *_: "HOST")
    assert "'x' is a shape tensor in CPU memory" in refused(tmp_path, small.plan(fake))


def _changed(dtype: int = TensorProto.FLOAT, width: int = small.WIDTH, name: str = "x") -> bytes:
    """The network with another first input."""
    model = small.network()
    tensor = model.graph.input[0].type.tensor_type
    tensor.elem_type = dtype
    tensor.shape.dim[2].dim_value = width
    model.graph.input[0].name = name
    data: bytes = model.SerializeToString()
    return data


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"network": _changed(TensorProto.FLOAT16)},
            "inputs: the manifest says x float32 [batch, tokens, 4], the plan has float16"
            " [?, ?, 4]",
        ),
        (
            {"network": _changed(width=5)},
            "inputs: the manifest says x float32 [batch, tokens, 4], the plan has float32"
            " [?, ?, 5]",
        ),
        (
            {"network": _changed(name="z")},
            "inputs: the manifest says mask, x, the plan has mask, z",
        ),
        (
            {"profile": small.PROFILE | {"mask": ((1, 2), (2, 4), (8, 6))}},
            "input 'mask': the manifest says shapes [1, 2] / [2, 4] / [4, 6], the plan was built"
            " for [1, 2] / [2, 4] / [8, 6]",
        ),
    ],
)
def test_a_plan_that_is_not_what_the_manifest_says(
    tmp_path: Path, fake: FakeTensorRT, changes: dict[str, Any], sentence: str
) -> None:
    assert refused(tmp_path, small.plan(fake, **changes)) == f"engine.plan: {sentence}"


def test_a_manifest_that_is_not_what_the_plan_says(tmp_path: Path, fake: FakeTensorRT) -> None:
    content = small.manifest()
    extra = Output(name="more", dtype="float32", shape=())
    plan = {"engine.plan": small.plan(fake)}
    more = msgspec.structs.replace(content, outputs=(*content.outputs, extra))
    with pytest.raises(BundleError, match="outputs: the manifest says more, total, y, the plan"):
        opened(tmp_path / "a", plan, content=more)
    stray = ShapeRange(name="q", least=(1,), optimal=(1,), greatest=(1,))
    with pytest.raises(
        BundleError, match="the manifest has a profile of 'q', which is not an input"
    ):
        opened(tmp_path / "b", plan, profile=(*small.record().profile, stray))
    with pytest.raises(BundleError, match="input 'x': the manifest says shapes"):
        opened(tmp_path / "c", plan, profile=small.record().profile[1:])


def test_sizes_that_never_vary_need_no_profile(tmp_path: Path, fake: FakeTensorRT) -> None:
    model = small.network()
    for value, sizes in zip(model.graph.input, ((2, 3), (2, 3)), strict=True):
        for dim, size in zip(value.type.tensor_type.shape.dim, sizes, strict=False):
            dim.dim_value = size
    inputs = (
        Input(name="x", kind="tensor", dtype="float32", shape=(2, 3, small.WIDTH)),
        Input(name="mask", kind="attention_mask", dtype="bool", shape=(2, 3)),
    )
    content = small.manifest(
        small.record(profile=()), inputs=inputs, symbols={"batch": (2, 2), "tokens": (3, 3)}
    )
    plan = small.plan(fake, network=model.SerializeToString(), profile={})
    feeds = small.feeds()
    with opened(tmp_path, {"engine.plan": plan}, content=content) as engine:
        found = engine.run(feeds)["y"]
    np.testing.assert_allclose(found, small.wanted(**feeds), rtol=1e-5, atol=1e-6)
