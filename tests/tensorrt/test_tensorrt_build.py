"""What a TensorRT build is asked for, and what comes of it, through a fake of TensorRT.

A green test proves which calls are made and what is written; it proves nothing about TensorRT.
"""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fake_tensorrt_base import unpack_plan
from onnx import load_from_string
from tensorrt_orders import FEATURES, Rig, make_rig, program

from enginecast.errors import LoweringError, MissingError
from enginecast.exporters.registry import target_of
from enginecast.exporters.target import LoweringRequest
from enginecast.exporters.tensorrt import lower as exporter
from enginecast.exporters.tensorrt.lower import PLAN_FILE, lower_to_tensorrt
from enginecast.runtime.bundle.manifest import ShapeRange

VERSIONS = ("10.15.1.29+fake", "11.0.0.114+fake")


@pytest.fixture(params=VERSIONS)
def rig(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Rig:
    return make_rig(monkeypatch, tmp_path, request.param)


@pytest.fixture
def newest(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Rig:
    return make_rig(monkeypatch, tmp_path, VERSIONS[-1])


def flags(rig: Rig) -> set[str]:
    return {call["flag"].name for call in rig.fake.called("IBuilderConfig.set_flag")}


def plan_in(rig: Rig) -> Any:
    return unpack_plan((rig.folder / PLAN_FILE).read_bytes())


def test_a_plain_build(rig: Rig) -> None:
    made = lower_to_tensorrt(rig.order())
    assert rig.files == [PLAN_FILE]
    assert made.files == (PLAN_FILE,)
    assert made.record["profile"] == (
        ShapeRange(name="x", least=(1, 24), optimal=(8, 24), greatest=(8, 24)),
    )
    assert made.record["network"] is None
    assert made.quantized == ""
    assert made.opset == 0
    assert sum(made.ops.values()) == made.nodes > 0
    assert made.requires["tensorrt"] == rig.fake.__version__
    assert made.requires["gpu"] == "sm90"
    assert made.minimum_runtime == f"tensorrt=={rig.fake.__version__}"
    plan = plan_in(rig)
    assert plan.profile == {"x": [[1, 24], [8, 24], [8, 24]]}
    assert plan.detailed
    assert plan.flags == []  # TF32 is off


def test_the_network_is_strongly_typed(rig: Rig) -> None:
    lower_to_tensorrt(rig.order())
    typed = int(rig.fake.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
    assert rig.fake.called("Builder.create_network") == [{"flags": 1 << typed}]
    cleared = [call["flag"].name for call in rig.fake.called("IBuilderConfig.clear_flag")]
    assert cleared == ["TF32"]


def test_the_plan_holds_the_program(newest: Rig) -> None:
    lower_to_tensorrt(newest.order())
    trt = newest.fake
    engine = trt.Runtime(trt.Logger(trt.Logger.ERROR)).deserialize_cuda_engine(
        (newest.folder / PLAN_FILE).read_bytes()
    )
    context = engine.create_execution_context()
    x, out = torch.randn(4, FEATURES), torch.zeros(4, 5)
    assert context.set_input_shape("x", tuple(x.shape))
    assert context.set_tensor_address("x", x.data_ptr())
    assert context.set_tensor_address("out", out.data_ptr())
    assert context.execute_async_v3(0)
    np.testing.assert_allclose(out, program()[0](x).detach(), rtol=1e-5, atol=1e-6)
    assert not context.set_input_shape("x", (9, FEATURES))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"refit": True}, {"REFIT"}),
        ({"strip_weights": True}, {"REFIT_IDENTICAL", "STRIP_PLAN"}),
        ({"strip_weights": True, "refit": True}, {"REFIT", "STRIP_PLAN"}),
        ({"version_compatible": True}, {"VERSION_COMPATIBLE"}),
        ({}, set()),
    ],
)
def test_flags(rig: Rig, options: dict[str, Any], expected: set[str]) -> None:
    lower_to_tensorrt(rig.order(**options))
    assert flags(rig) == expected


def test_a_stripped_plan_lies_beside_its_network(rig: Rig) -> None:
    made = lower_to_tensorrt(rig.order(strip_weights=True))
    assert made.files[0] == PLAN_FILE
    assert made.record["network"] == made.files[1]
    assert sorted(made.files) == rig.files
    assert [name for name in made.files if name.endswith(".safetensors")]
    stripped = {w.name: w for w in load_from_string(plan_in(rig).network).graph.initializer}
    assert not stripped["wide.weight"].raw_data
    trt = rig.fake
    logger = trt.Logger(trt.Logger.ERROR)
    engine = trt.Runtime(logger).deserialize_cuda_engine(plan_in(rig).pack())
    refitter = trt.Refitter(engine, logger)
    assert "wide.weight" in refitter.get_missing_weights()
    parser = trt.OnnxParserRefitter(refitter, logger)
    assert parser.refit_from_file(str(rig.folder / str(made.record["network"])))
    assert refitter.get_missing_weights() == []


# What goes wrong.


def test_the_torch_route(newest: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def build(order: LoweringRequest, trt: Any, profile: Any, cache: Path) -> bytes:
        asked.extend((trt, profile, order.options.route, cache.name, cache.parent.is_dir()))
        return b"a plan"

    monkeypatch.setattr(exporter, "plan_by_torch", build)
    made = lower_to_tensorrt(newest.order(route="torch"))
    assert (newest.folder / PLAN_FILE).read_bytes() == b"a plan"
    assert made.files == (PLAN_FILE,)
    assert made.ops["aten::linear"] == 2
    assert made.record["network"] is None
    assert asked[0] is newest.fake
    assert asked[1] == made.record["profile"]
    assert asked[2] == "torch"
    assert asked[3].endswith("_driver-580.95.05.torch.cache")
    assert asked[4]


def test_a_build_that_fails(rig: Rig) -> None:
    rig.fake.failures.build = "Could not find any implementation for node {ForeignNode[wide]}"
    with pytest.raises(LoweringError, match=r"cannot build this engine: Could not find any") as e:
        lower_to_tensorrt(rig.order())
    assert str(e.value).count("Could not find") == 1  # the recorder and the logger both have it
    assert rig.files == []
    assert not list(rig.cache.glob("*"))  # nothing is remembered of a build that failed


def test_tensorrt_is_missing(newest: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    order = newest.order()
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    with pytest.raises(MissingError, match="needs tensorrt, which is not installed"):
        lower_to_tensorrt(order)
    with pytest.raises(MissingError, match="--target tensorrt needs tensorrt"):
        target_of("tensorrt").require(order.options)


def test_ctrl_c_ends_the_build(rig: Rig) -> None:
    rig.fake.failures.during_step = lambda step: os.kill(os.getpid(), signal.SIGINT)
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        lower_to_tensorrt(rig.order())
    assert signal.getsignal(signal.SIGINT) is before
    done = [done for phase, done, _ in rig.reported if phase == "Selecting tactics"]
    assert done == [0, 1]  # of four steps
    assert rig.files == []
