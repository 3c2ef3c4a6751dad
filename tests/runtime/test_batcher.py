"""Requests of many callers in one batch: outputs, order, fairness, errors, ends."""

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import bundles
import numpy as np
import pytest
from onnx import TensorProto, helper

from enginecast.errors import (
    InputError,
    StoppedError,
    UsageError,
)
from enginecast.runtime import Batcher
from enginecast.runtime.bundle.manifest import Padding
from enginecast.runtime.bundle.staging import stage
from enginecast.runtime.engine import Engine, Outputs
from enginecast.runtime.joining import Joining
from enginecast.runtime.load import load

PROVED = Padding(mask="attention_mask", side="any", outputs=("hidden",))
LARGE = {"batch": (1, 64), "sequence": (1, 16)}


def feeds(batch: int, sequence: int, seed: int = 0) -> dict[str, Any]:
    """Token ids and a mask that is longer in each row."""
    ids = np.random.default_rng(seed).integers(0, bundles.VOCABULARY, (batch, sequence))
    mask = np.ones((batch, sequence), np.int64)
    mask[0, max(1, sequence - 1) :] = 0
    return {"input_ids": ids, "attention_mask": mask}


class Counted:
    """Stands before an engine and keeps the inputs of its runs; holds them until it is opened."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.runs: list[Mapping[str, Any]] = []
        self.gate = threading.Event()
        self.gate.set()
        run = engine.run

        def counted(feeds: Mapping[str, Any], **options: Any) -> Outputs:
            self.runs.append(feeds)
            assert self.gate.wait(60)
            return run(feeds, **options)

        monkeypatch.setattr(engine, "run", counted)

    def until(self, runs: int) -> None:
        """Wait until so many began."""
        until = time.monotonic() + 60
        while len(self.runs) < runs:
            assert time.monotonic() < until
            time.sleep(0.001)


def opened(folder: Path, **changes: Any) -> Engine:
    content = bundles.manifest(**{"symbols": LARGE, "padding": PROVED, **changes})
    return load(bundles.make_bundle(folder / "bundle", content))


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    with opened(tmp_path) as one:
        yield one


def test_requests_run_together_and_get_their_own_rows(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = [feeds(1 + number % 3, 2 + number % 7, number) for number in range(20)]
    alone = [engine.run(one)["hidden"] for one in wanted]
    counted = Counted(engine, monkeypatch)
    with Batcher(engine, max_delay=0.05) as batcher:
        for _ in range(2):  # the first batch is compared with single runs, the second is not
            futures = [batcher.submit(one) for one in wanted]
            for future, single in zip(futures, alone, strict=True):
                found = future.result(60)
                np.testing.assert_array_equal(found["hidden"], single)
                assert found.backend == "onnxruntime-cpu"
    sizes = [len(run["input_ids"]) for run in counted.runs]
    assert max(sizes) > 30
    assert len(sizes) < 20 + 4


def test_lengths_run_apart_where_nothing_was_proved_of_padding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = opened(tmp_path, padding=None)
    counted = Counted(engine, monkeypatch)
    with Batcher(engine, max_delay=0.05) as batcher:
        futures = [batcher.submit(feeds(1, 3 + number % 2, number)) for number in range(8)]
        shapes = [future.result(60)["hidden"].shape for future in futures]
    assert shapes == [(1, 3 + number % 2, bundles.WIDTH) for number in range(8)]
    assert {run["input_ids"].shape for run in counted.runs} >= {(4, 3), (4, 4)}


def test_64_threads_get_what_a_single_run_gives(engine: Engine) -> None:
    wanted = [feeds(1 + number % 2, 1 + number % 9, number) for number in range(64)]
    alone = [engine.run(one)["hidden"].tobytes() for one in wanted]
    wrong: list[int] = []
    longest = [0.0] * 64
    with Batcher(engine, max_delay=0.002, max_batch=32, workers=2) as batcher:

        def work(number: int) -> None:
            for _ in range(30):
                began = time.monotonic()
                found = batcher.run(wanted[number], timeout=60)["hidden"]
                longest[number] = max(longest[number], time.monotonic() - began)
                if found.tobytes() != alone[number]:
                    wrong.append(number)

        with ThreadPoolExecutor(64) as pool:
            assert len([*pool.map(work, range(64))]) == 64
    assert wrong == []
    assert all(longest)


def test_the_oldest_goes_first_and_a_large_one_does_not_starve(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = Counted(engine, monkeypatch)
    order: list[int] = []

    def note(number: int) -> Callable[[Future[Outputs]], None]:
        return lambda future: order.append(number)

    with Batcher(engine, max_delay=0, max_batch=4) as batcher:
        counted.gate.clear()
        first = batcher.submit(feeds(1, 3))
        counted.until(1)  # the worker is busy; the others wait
        sizes = [1, 4, 1, 1, 3, 1]
        for number, size in enumerate(sizes):
            batcher.submit(feeds(size, 3, number)).add_done_callback(note(number))
        counted.gate.set()
        first.result(60)
    assert order == [0, 1, 2, 3, 4, 5]
    assert max(len(run["input_ids"]) for run in counted.runs) == 4


def test_bad_inputs_never_wait(engine: Engine) -> None:
    with Batcher(engine, max_delay=10) as batcher:
        with pytest.raises(InputError, match="'attention_mask' is missing"):
            batcher.submit({"input_ids": feeds(1, 3)["input_ids"]})
        with pytest.raises(InputError, match="input_ids"):
            batcher.run({**feeds(1, 3), "input_ids": np.full((1, 3), 99)})


def test_rows_that_depend_on_one_another_run_alone(tmp_path: Path) -> None:
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        [
            helper.make_node("ReduceMean", ["x", "axis"], ["mean"], keepdims=1),
            helper.make_node("Sub", ["x", "mean"], ["y"]),
        ],
        "centered",
        [value("x", TensorProto.FLOAT, ["batch", 3])],
        [value("y", TensorProto.FLOAT, ["batch", 3])],
        [helper.make_tensor("axis", TensorProto.INT64, [1], [0])],
    )
    with stage(tmp_path / "centered") as staging:
        bundles.save_model(graph, staging.folder / "engine.onnx")
        staging.publish(bundles.unary_manifest("float32", symbols={"batch": (1, 64)}))
    engine = load(tmp_path / "centered")
    inputs = [{"x": np.full((2, 3), one, np.float32) + np.eye(2, 3)} for one in range(6)]
    inputs = [{"x": one["x"].astype(np.float32)} for one in inputs]
    alone = [engine.run(one)["y"] for one in inputs]
    with Batcher(engine, max_delay=0.05) as batcher:
        for _ in range(2):
            futures = [batcher.submit(one) for one in inputs]
            for future, single in zip(futures, alone, strict=True):
                np.testing.assert_array_equal(future.result(60)["y"], single)
        assert batcher.joins is False


def test_waiting_has_bounds(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counted(engine, monkeypatch)
    with Batcher(engine, max_delay=0, max_waiting=2) as batcher:
        counted.gate.clear()
        busy = batcher.submit(feeds(1, 3))
        counted.until(1)
        with pytest.raises(StoppedError, match=r"did not finish in 0\.05 s"):
            batcher.run(feeds(1, 3), timeout=0.05)
        batcher.submit(feeds(1, 3))
        with pytest.raises(StoppedError, match="2 requests are already waiting"):
            batcher.submit(feeds(1, 3))
        counted.gate.set()
        busy.result(60)
    assert sum(len(run["input_ids"]) for run in counted.runs) == 2  # the late one never ran


def test_a_fork_is_refused_and_does_not_wait_for_ever(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Batcher(engine) as batcher:
        batcher.run(feeds(1, 3))
        with monkeypatch.context() as patched:
            patched.setattr(os, "getpid", lambda: -1)
            with pytest.raises(UsageError, match="made in another process, which was forked"):
                batcher.submit(feeds(1, 3))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_batch": 0}, r"max_batch: expected 1\.\.64, got 0"),
        ({"max_batch": 65}, r"max_batch: expected 1\.\.64, got 65"),
        ({"max_delay": -1}, "max_delay: expected seconds, 0 or more, got -1"),
        ({"workers": 0}, "workers: expected at least 1, got 0"),
        ({"max_waiting": 0}, "max_waiting: expected at least 1, got 0"),
    ],
)
def test_bad_options(engine: Engine, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Batcher(engine, **options)
    with pytest.raises(UsageError, match="Batcher: expected an engine, got a str"):
        Batcher("bundle")  # type: ignore[arg-type]


@pytest.mark.parametrize("where", ["join", "part", "difference"])
@pytest.mark.parametrize("error", [MemoryError, SystemExit])
def test_no_error_ends_the_thread_that_others_wait_for(
    where: str, error: type[BaseException], engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: Any) -> None:
        raise error("in the middle of a batch")

    monkeypatch.setattr(Joining, where, failing)
    with Batcher(engine, max_delay=0.1) as batcher:
        for _ in range(2):
            futures = [batcher.submit(feeds(1, 3)) for _ in range(3)]
            for future in futures:
                assert future.result(20)["hidden"].shape == (1, 3, bundles.WIDTH)
