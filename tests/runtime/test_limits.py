"""What a run may take: time, memory, company; and what is said of outputs that are not finite."""

import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import bundles
import numpy as np
import pytest
from onnx import TensorProto, helper

from enginecast.errors import MissingError, StoppedError, UsageError
from enginecast.runtime.bundle.manifest import Input, Output
from enginecast.runtime.bundle.staging import stage
from enginecast.runtime.engine import Engine
from enginecast.runtime.load import load


def looping(folder: Path) -> Path:
    """x [1] -> y [1]: adds 1 to itself x times."""
    one = helper.make_tensor("one", TensorProto.FLOAT, [1], [1.0])
    value = helper.make_tensor_value_info
    body = helper.make_graph(
        [
            helper.make_node("Identity", ["going"], ["still"]),
            helper.make_node("Add", ["before", "one"], ["after"]),
        ],
        "body",
        [
            value("turn", TensorProto.INT64, []),
            value("going", TensorProto.BOOL, []),
            value("before", TensorProto.FLOAT, [1]),
        ],
        [value("still", TensorProto.BOOL, []), value("after", TensorProto.FLOAT, [1])],
        [one],
    )
    graph = helper.make_graph(
        [
            helper.make_node("Cast", ["x"], ["turns"], to=TensorProto.INT64),
            helper.make_node("Loop", ["turns", "", "zero"], ["y"], body=body),
        ],
        "looping",
        [value("x", TensorProto.FLOAT, [1])],
        [value("y", TensorProto.FLOAT, [1])],
        [helper.make_tensor("zero", TensorProto.FLOAT, [1], [0.0])],
    )
    content = bundles.manifest(
        inputs=(Input(name="x", kind="tensor", dtype="float32", shape=(1,)),),
        outputs=(Output(name="y", dtype="float32", shape=(1,)),),
        symbols={},
        text=None,
        engines=(bundles.engine(weights=None),),
    )
    with stage(folder) as staging:
        bundles.save_model(graph, staging.folder / "engine.onnx")
        return staging.publish(content)


ENDLESS = {"x": np.array([1e18], np.float32)}
SHORT = {"x": np.array([3], np.float32)}


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    return load(looping(tmp_path / "loop"))


def test_a_run_that_does_not_end_is_stopped(engine: Engine) -> None:
    with pytest.raises(StoppedError, match=r"engine\.onnx: the run did not end in the 0\.2 s"):
        engine.run(ENDLESS, timeout=0.2)
    assert engine.run(SHORT, timeout=60)["y"].tolist() == [3]
    assert engine.run(SHORT)["y"].tolist() == [3]


@pytest.mark.parametrize("as_dlpack", [False, True])
def test_other_runs_go_on(engine: Engine, as_dlpack: bool) -> None:
    with ThreadPoolExecutor(2) as pool:
        stopped = pool.submit(engine.run, ENDLESS, timeout=0.3, as_dlpack=as_dlpack)
        while not stopped.done():
            assert engine.run(SHORT)["y"].tolist() == [3]
        with pytest.raises(StoppedError):
            stopped.result()


def test_runs_are_canceled(engine: Engine) -> None:
    assert engine.cancel() == 0
    with ThreadPoolExecutor(3) as pool:
        runs = [pool.submit(engine.run, ENDLESS) for _ in range(3)]
        canceled = 0
        while not all(run.done() for run in runs):
            canceled = max(canceled, engine.cancel())
            time.sleep(0.01)
        for run in runs:
            with pytest.raises(StoppedError, match="the run was canceled"):
                run.result()
    assert canceled
    assert engine.run(SHORT)["y"].tolist() == [3]


def test_no_more_runs_than_allowed_are_under_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = load(bundles.make_bundle(tmp_path / "out"), max_runs=2)
    session: Any = engine._session
    seen, lock, now = [], threading.Lock(), [0]

    def counted(feeds: Any, outputs: Any) -> Any:
        with lock:
            now[0] += 1
            seen.append(now[0])
        time.sleep(0.005)
        with lock:
            now[0] -= 1
        return original(feeds, outputs)

    original = session.run_to_host
    monkeypatch.setattr(session, "run_to_host", counted)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: engine.run(bundles.feeds()), range(24)))
    assert max(seen) == 2


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), float("inf")])
def test_wrong_timeouts(engine: Engine, timeout: float) -> None:
    with pytest.raises(UsageError, match="timeout: expected seconds"):
        engine.run(SHORT, timeout=timeout)


def test_sizes_whose_outputs_do_not_fit_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wide = bundles.unary_manifest("float32", symbols={"batch": (1, 1 << 40)})
    engine = load(bundles.make_unary_bundle(tmp_path / "u", wide, "Identity", TensorProto.FLOAT))
    huge = np.broadcast_to(np.zeros((1, 3), np.float32), (1 << 38, 3))
    monkeypatch.setattr("enginecast.runtime.engine.check_inputs", lambda *_, **__: {"x": huge})
    with pytest.raises(MissingError, match=r"x \[274877906944, 3\]: the outputs alone take 3298"):
        engine.run({"x": huge})


def test_an_engine_does_not_follow_a_fork(tmp_path: Path) -> None:
    code = (
        "import os, sys, bundles\n"
        "from enginecast.runtime.load import load\n"
        "from enginecast.errors import UsageError\n"
        "engine = load(sys.argv[1])\n"
        "engine.run(bundles.feeds())\n"
        "if os.fork() == 0:\n"
        "    try:\n"
        "        engine.run(bundles.feeds())\n"
        "    except UsageError as error:\n"
        "        os._exit(7 if 'forked' in str(error) else 8)\n"
        "    os._exit(9)\n"
        "assert os.waitstatus_to_exitcode(os.wait()[1]) == 7\n"
        "engine.run(bundles.feeds())\n"
    )
    root = bundles.make_bundle(tmp_path / "out")
    command = [sys.executable, "-W", "ignore", "-c", code, str(root)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1] / "support")}
    subprocess.run(command, env=environment, check=True, timeout=60)


def test_the_command(tmp_path: Path) -> None:
    from enginecast.runtime.bundle.tensor_files import read_tensors, write_tensors

    content = bundles.unary_manifest("float32")
    root = bundles.make_unary_bundle(tmp_path / "u", content, "Exp", TensorProto.FLOAT)
    write_tensors(tmp_path / "in.safetensors", {"x": np.full((1, 3), 100, np.float32)})
    command = [sys.executable, "-m", "enginecast", "run", str(root), "--inputs"]
    command += [str(tmp_path / "in.safetensors"), "-o", str(tmp_path / "out.safetensors")]
    refused = subprocess.run(command, capture_output=True, text=True, check=False)
    assert refused.returncode == 1
    assert "x [1, 3] in 100 to 100" in refused.stderr
    assert not (tmp_path / "out.safetensors").exists()
    subprocess.run([*command, "--allow-non-finite"], check=True, capture_output=True)
    assert np.isinf(read_tensors(tmp_path / "out.safetensors")["y"]).all()
    root = looping(tmp_path / "loop")
    write_tensors(tmp_path / "in.safetensors", ENDLESS)
    command[4] = str(root)
    done = subprocess.run(
        [*command, "--timeout", "0.5"], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 3
    assert "did not end in the 0.5 s" in done.stderr
