"""Which plans are read, and which are refused: with the fake of TensorRT and a CPU stand-in."""

from pathlib import Path
from typing import Any

import pytest
import tensorrt_bundles as small
from cpu_stand_in import use_stand_in
from fake_tensorrt import FakeTensorRT, install
from onnx import TensorProto

from enginecast.errors import BundleError, MissingError
from enginecast.runtime.engine import Engine
from enginecast.runtime.load import load


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


def test_tensorrt_does_not_start(tmp_path: Path, fake: FakeTensorRT, monkeypatch: Any) -> None:
    def refuse(self: object, logger: object) -> None:
        raise TypeError("pybind11::init(): factory function returned nullptr")

    monkeypatch.setattr(fake.Runtime, "__init__", refuse)
    with pytest.raises(
        MissingError, match=r"^engine\.plan: TensorRT 11\.0\.0\.114.* create a runtime"
    ):
        opened(tmp_path, {"engine.plan": small.plan(fake)})


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
