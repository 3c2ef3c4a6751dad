"""Running TensorRT engines, with the fake of TensorRT and a CPU stand-in for the GPU."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorrt_bundles as small
import torch
from cpu_stand_in import STREAM, CpuStandIn, use_stand_in
from fake_tensorrt import FakeTensorRT, install

from enginecast.errors import InputError
from enginecast.runtime.engine import Engine
from enginecast.runtime.load import load
from enginecast.runtime.sessions.tensorrt.lanes import LANES
from enginecast.runtime.sessions.tensorrt.session import TensorRTSession
from enginecast.runtime.values.device_tensor import DeviceTensor


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> CpuStandIn:
    return use_stand_in(monkeypatch)


@pytest.fixture(params=["10.15.1.29+fake", "11.0.0.114+fake"])
def fake(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> FakeTensorRT:
    return install(monkeypatch, request.param)


def opened(root: Path, fake: FakeTensorRT, content: Any = None, **options: Any) -> Engine:
    """The small plan, published and loaded."""
    requires = small.REQUIRES | {"tensorrt": fake.__version__}
    content = content or small.manifest(small.record(requires=requires))
    small.publish(root / "out", {"engine.plan": small.plan(fake)}, content)
    return load(root / "out", device="cuda", allow_code=True, **options)


def session_of(engine: Engine) -> TensorRTSession:
    session = engine._session
    assert isinstance(session, TensorRTSession)
    return session


def test_it_computes_what_numpy_does(
    tmp_path: Path, fake: FakeTensorRT, stand_in: CpuStandIn
) -> None:
    feeds = small.feeds()
    with opened(tmp_path, fake) as engine:
        assert (engine.provider, engine.backend) == ("tensorrt", "tensorrt")
        found = engine.run(feeds)
        assert list(found) == ["y", "total"]
        np.testing.assert_allclose(found["y"], small.wanted(**feeds), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(found["total"], found["y"].sum(), rtol=1e-5)
        assert list(engine.run(feeds, outputs=["total"])) == ["total"]
        on_device = engine.run(feeds, as_dlpack=True)["y"]
        assert isinstance(on_device, torch.Tensor)
        np.testing.assert_array_equal(np.from_dlpack(on_device), found["y"])
    assert {
        call["stream_handle"] for call in fake.called("IExecutionContext.execute_async_v3")
    } == {STREAM}


def test_tensors_on_the_device_go_in_by_their_address(
    tmp_path: Path, fake: FakeTensorRT, stand_in: CpuStandIn
) -> None:
    feeds = {name: torch.from_numpy(array) for name, array in small.feeds().items()}
    room = torch.empty(feeds["x"].numel() + 128)
    start = (-room.data_ptr() % 256) // 4
    aligned = room[start:][: feeds["x"].numel()].view(feeds["x"].shape).copy_(feeds["x"])
    shifted = room[start + 1 :][: feeds["x"].numel()].view(feeds["x"].shape)
    with opened(tmp_path, fake, cuda_graphs=False) as engine:
        session = session_of(engine)

        def address(x: torch.Tensor) -> int:
            session.run({"x": DeviceTensor(x), "mask": DeviceTensor(feeds["mask"])}, ["y"])
            calls = fake.called("IExecutionContext.set_tensor_address")
            return int([call["memory"] for call in calls if call["name"] == "x"][-1])

        assert address(aligned) == aligned.data_ptr()
        assert address(shifted) not in (shifted.data_ptr(), aligned.data_ptr())


def test_what_tensorrt_says_of_a_failed_run_is_in_the_error(
    tmp_path: Path, fake: FakeTensorRT, stand_in: CpuStandIn
) -> None:
    with opened(tmp_path, fake) as engine:
        fake.failures.execute = "Error Code 1: Cuda Runtime (an illegal memory access)"
        with pytest.raises(InputError) as caught:
            engine.run(small.feeds())
    assert caught.value.message == (
        "engine.plan: failed on x [2, 3, 4], mask [2, 3]: Error Code 1: Cuda Runtime (an illegal"
        " memory access)"
    )


@pytest.mark.parametrize("cuda_graphs", [True, False])
def test_several_threads_at_once(
    tmp_path: Path, fake: FakeTensorRT, stand_in: CpuStandIn, cuda_graphs: bool
) -> None:
    meet = threading.Barrier(8)

    def work(seed: int) -> None:
        meet.wait()
        for turn in range(6):
            feeds = small.feeds(1 + (seed + turn) % 4, 2 + turn % 3, seed=10 * seed + turn)
            found = engine.run(feeds)["y"]
            np.testing.assert_allclose(found, small.wanted(**feeds), rtol=1e-5, atol=1e-6)

    with opened(tmp_path, fake, cuda_graphs=cuda_graphs) as engine:
        with ThreadPoolExecutor(8) as threads:
            list(threads.map(work, range(8)))
        assert 1 <= session_of(engine).lanes.made <= LANES
