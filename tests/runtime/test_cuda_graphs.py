"""When a run is recorded and replayed, without a GPU: what records is handed in."""

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from enginecast.runtime.device.cuda_graphs import GraphCache, Run, key_of


class Log:
    """Runs and records by adding one, and says which it did."""

    def __init__(self, fails: str = "") -> None:
        self.said: list[str] = []
        self.fails = fails

    def run(self, tensors: Sequence[Any]) -> list[Any]:
        self.said.append("run")
        return [one + 1 for one in tensors]

    def record(self, run: Run, tensors: Sequence[Any]) -> Run:
        self.said.append("record")
        if self.fails:
            raise RuntimeError(self.fails)

        def replay(given: Sequence[Any]) -> list[Any]:
            assert [one.shape for one in given] == [one.shape for one in tensors]
            self.said.append("replay")
            return [one + 1 for one in given]

        return replay

    def cache(self, **options: int) -> GraphCache:
        return GraphCache(self.run, self.record, **options)


def ones(*shape: int, dtype: type = np.float32) -> Any:
    return np.ones(shape, dtype)


def test_the_third_run_of_the_same_shapes_is_recorded_and_then_replayed() -> None:
    log = Log()
    cache = log.cache(after=3)
    for _ in range(5):
        (found,) = cache([ones(2, 3)])
        assert (found == 2).all()
    assert log.said == ["run", "run", "record", "replay", "replay", "replay"]
    assert cache.recorded == (key_of([ones(2, 3)]),)


def test_what_cannot_be_recorded_runs_as_it_is_and_is_not_tried_again() -> None:
    log = Log(fails="operation not permitted when stream is capturing\nmore")
    cache = log.cache(after=1)
    with pytest.warns(
        UserWarning, match="cannot record a CUDA graph, .* not permitted"
    ) as reported:
        found = [cache([ones(width)]) for width in (1, 1, 2)]
    assert all((one == 2).all() for (one,) in found)
    assert len(reported) == 1
    assert log.said == ["record", "run", "run", "run"]
    assert cache.refused == "operation not permitted when stream is capturing"


def test_replays_do_not_overlap() -> None:
    busy = threading.Lock()
    overlaps: list[int] = []

    def record(run: Run, tensors: Sequence[Any]) -> Run:
        def replay(given: Sequence[Any]) -> list[Any]:
            if not busy.acquire(blocking=False):
                overlaps.append(1)
                return []
            threading.Event().wait(0.001)
            busy.release()
            return list(given)

        return replay

    cache = GraphCache(Log().run, record, after=1)

    def work() -> None:
        for _ in range(10):
            cache([ones(2)])

    workers = [threading.Thread(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert overlaps == []
