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

from enginecast.errors import InputError, MissingError
from enginecast.runtime.bundle.manifest import ShapeRange
from enginecast.runtime.engine import Engine
from enginecast.runtime.load import load
from enginecast.runtime.sessions.tensorrt.lanes import LANES, Lanes
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


def test_outputs_outlive_the_runs_after_them(
    tmp_path: Path, fake: FakeTensorRT, stand_in: CpuStandIn
) -> None:
    with opened(tmp_path, fake) as engine:
        for _ in range(2):  # also where a graph is replayed
            for _ in range(3):
                first = engine.run(small.feeds(seed=1), as_dlpack=True)["y"]
            kept = first.clone()
            second = engine.run(small.feeds(seed=2), as_dlpack=True)["y"]
            assert torch.equal(first, kept)
            assert not torch.equal(first, second)


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


def test_a_tensor_on_another_device_is_refused(
    tmp_path: Path, fake: FakeTensorRT, stand_in: CpuStandIn
) -> None:
    feeds = small.feeds()
    elsewhere = DeviceTensor(torch.empty(feeds["x"].shape, device="meta"))
    with opened(tmp_path, fake) as engine, pytest.raises(InputError, match="'x': expected a ten"):
        session_of(engine).run({"x": elsewhere, "mask": feeds["mask"]}, ["y"])


def test_a_shape_outside_the_profile_is_refused_and_the_next_run_is_right(
    tmp_path: Path, fake: FakeTensorRT, stand_in: CpuStandIn
) -> None:
    requires = small.REQUIRES | {"tensorrt": fake.__version__}
    symbols = {"batch": (1, 9), "tokens": (2, 6)}
    content = small.manifest(small.record(requires=requires), symbols=symbols)
    with opened(tmp_path, fake, content) as engine:
        engine.run(small.feeds())
        with pytest.raises(InputError) as caught:
            engine.run(small.feeds(batch=7))
        assert "input 'x': expected a shape in [1, 2, 4]..[4, 6, 4], got [7, 3, 4]: " in str(
            caught.value
        )
        assert "is not within" in str(caught.value)
        feeds = small.feeds(seed=8)
        found = engine.run(feeds)["y"]
    np.testing.assert_allclose(found, small.wanted(**feeds), rtol=1e-5, atol=1e-6)


def test_shapes_that_were_set_in_part_are_set_again(
    tmp_path: Path, fake: FakeTensorRT, stand_in: CpuStandIn
) -> None:
    """Of the second run, the first shape fits and the second does not."""
    narrow = small.PROFILE | {"mask": ((1, 2), (2, 4), (2, 6))}
    ranges = [
        ShapeRange(name=name, least=least, optimal=optimal, greatest=greatest)
        for name, (least, optimal, greatest) in narrow.items()
    ]
    requires = small.REQUIRES | {"tensorrt": fake.__version__}
    record = small.record(requires=requires, profile=tuple(ranges))
    plan = small.plan(fake, profile=narrow)
    small.publish(tmp_path / "out", {"engine.plan": plan}, small.manifest(record))
    with load(tmp_path / "out", device="cuda", allow_code=True) as engine:
        engine.run(small.feeds(batch=2))
        with pytest.raises(InputError, match=r"'mask': expected a shape in \[1, 2\]\.\.\[2, 6\]"):
            engine.run(small.feeds(batch=3))
        feeds = small.feeds(batch=2, seed=4)
        found = engine.run(feeds)["y"]
    np.testing.assert_allclose(found, small.wanted(**feeds), rtol=1e-5, atol=1e-6)


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


def test_shapes_that_depend_on_values_are_refused(
    tmp_path: Path, fake: FakeTensorRT, stand_in: CpuStandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path, fake) as engine:
        monkeypatch.setattr(fake.IExecutionContext, "get_tensor_shape", lambda *_: (-1, 3))
        with pytest.raises(InputError, match=r"shape of output 'y' depends on values \(\[-1, 3\]"):
            engine.run(small.feeds())


def test_no_context_is_to_be_had(
    tmp_path: Path, fake: FakeTensorRT, stand_in: CpuStandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fake.ICudaEngine, "create_execution_context", lambda self: None)
    with pytest.raises(
        MissingError, match=r"engine\.plan: TensorRT cannot create an execution context"
    ):
        opened(tmp_path, fake)


def test_runs_that_repeat_are_replayed(
    tmp_path: Path, fake: FakeTensorRT, stand_in: CpuStandIn
) -> None:
    with opened(tmp_path, fake) as engine:
        for seed in range(5):
            feeds = small.feeds(seed=seed)
            found = engine.run(feeds)["y"]
            np.testing.assert_allclose(found, small.wanted(**feeds), rtol=1e-5, atol=1e-6)
    assert stand_in.log == ["record", "replay", "replay", "replay"]
    # A context for each graph; its shapes are set before it is recorded, and never again.
    assert len(fake.called("ICudaEngine.create_execution_context")) == 2
    assert len(fake.called("IExecutionContext.set_input_shape")) == 4


def test_graphs_can_be_off(tmp_path: Path, fake: FakeTensorRT, stand_in: CpuStandIn) -> None:
    with opened(tmp_path, fake, cuda_graphs=False) as engine:
        for _ in range(5):
            engine.run(small.feeds())
    assert stand_in.log == []
    assert len(fake.called("IExecutionContext.set_input_shape")) == 2


def test_where_no_graph_can_be_recorded_runs_go_on(
    tmp_path: Path, fake: FakeTensorRT, stand_in: CpuStandIn
) -> None:
    stand_in.refuses = "operation not permitted when stream is capturing"
    feeds = small.feeds()
    with (
        opened(tmp_path, fake) as engine,
        pytest.warns(UserWarning, match="cannot record a CUDA graph, so runs continue without"),
    ):
        found = [engine.run(feeds)["y"] for _ in range(5)]
    for one in found:
        np.testing.assert_allclose(one, small.wanted(**feeds), rtol=1e-5, atol=1e-6)


def test_where_there_is_no_memory_for_a_graph_runs_go_on(
    tmp_path: Path, fake: FakeTensorRT, stand_in: CpuStandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    feeds = small.feeds()
    with opened(tmp_path, fake) as engine:
        monkeypatch.setattr(fake.ICudaEngine, "create_execution_context", lambda self: None)
        with pytest.warns(
            UserWarning, match=r"continue without one: .* cannot create an execution context"
        ):
            found = [engine.run(feeds)["y"] for _ in range(5)]
    np.testing.assert_allclose(found[-1], small.wanted(**feeds), rtol=1e-5, atol=1e-6)


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


def test_the_layers_are_reported(tmp_path: Path, fake: FakeTensorRT, stand_in: CpuStandIn) -> None:
    with opened(tmp_path, fake) as engine:
        session = session_of(engine)
        assert session.inspect().kept("RMSNormalization").whole == ("node_rms_norm",)
        assert session.layers()[0] == "6 layers: 5 kgen, 1 gemm"


class Numbered:
    """A lane, as far as `Lanes` looks at it."""

    def __init__(self, number: int) -> None:
        self.stream = number
        self.owner: threading.Thread | None = None


class Made:
    """Lanes of `Numbered`, whose streams are busy as the test says."""

    def __init__(self) -> None:
        self.count = 0
        self.busy: set[int] = set()
        make: Any = self.make
        self.lanes = Lanes(make, lambda stream: stream not in self.busy)

    def make(self) -> Numbered:
        self.count += 1
        return Numbered(self.count)

    def taken_elsewhere(self) -> int:
        """The lane that another thread gets."""
        found: list[int] = []

        def take() -> None:
            with self.lanes.take() as lane:
                found.append(lane.stream)

        worker = threading.Thread(target=take)
        worker.start()
        worker.join(10)
        return found[0]


def test_a_thread_gets_its_lane_again_and_others_the_idle_ones() -> None:
    made = Made()
    with made.lanes.take() as lane:
        assert lane.stream == 1
    made.busy = {1}
    with made.lanes.take() as lane:
        assert lane.stream == 1  # its own: the order of its work is kept
    assert made.taken_elsewhere() == 2
    made.busy = {1, 2}
    assert made.taken_elsewhere() == 3
    made.busy = {1, 3}
    assert made.taken_elsewhere() == 2
    assert made.count == 3


def test_lanes_are_bounded_and_waited_for() -> None:
    made = Made()
    made.busy = set(range(1, LANES + 1))
    held = [made.lanes.take() for _ in range(LANES)]
    streams = [one.__enter__().stream for one in held]
    assert sorted(streams) == list(range(1, LANES + 1))
    found: list[int] = []
    waiting = threading.Thread(target=lambda: found.append(made.taken_elsewhere()))
    waiting.start()
    waiting.join(0.05)
    assert (found, made.count) == ([], LANES)
    held[2].__exit__(None, None, None)
    waiting.join(10)
    assert (found, made.count) == ([streams[2]], LANES)


def test_a_lane_that_could_not_be_made_leaves_room_for_another() -> None:
    made = Made()

    def fail() -> Any:
        raise MissingError("no memory")

    made.lanes._make = fail
    with made.lanes.take():
        for _ in range(LANES + 1):
            with pytest.raises(MissingError, match="no memory"), made.lanes.take():
                pass
    assert made.lanes.made == 1
