"""Time on a device: medians of interleaved rounds, matrix products in a graph, and a budget."""

import gc
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from statistics import median
from types import FrameType

import torch

WARM_ROUNDS = 3
FEWEST_ROUNDS = 5
REPEATS = 20
"""Products that are timed as one, so that what launching costs is not part of them."""
COLD_BYTES = 256 << 20
"""Operands of one product are taken in turns from as many copies: more than any cache holds."""


class BudgetSpent(BaseException):
    """The time is over; no `except Exception` on the way, of a compiler's say, may hold it up."""


class Budget:
    """Seconds for all of a run; None: no limit."""

    def __init__(self, seconds: float | None) -> None:
        self._end = None if seconds is None else time.monotonic() + seconds

    def left(self) -> float:
        """Seconds that are left."""
        return float("inf") if self._end is None else self._end - time.monotonic()

    @contextmanager
    def limit(self, reserve: float = 0.0) -> Iterator[None]:
        """Raise `BudgetSpent` within the block when all but `reserve` seconds are spent."""
        if self._end is None:
            yield
            return
        left = self.left() - reserve
        if left <= 0:
            raise BudgetSpent
        before = signal.signal(signal.SIGALRM, _spent)
        signal.setitimer(signal.ITIMER_REAL, left)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)


def _spent(number: int, frame: FrameType | None) -> None:
    raise BudgetSpent


def wait(device: str) -> None:
    """Until the device has done what it was given."""
    if device == "cuda":
        torch.cuda.synchronize()


def milliseconds(run: Callable[[], object], device: str) -> float:
    """Of one call, from its first launch to its last result on the device."""
    if device != "cuda":
        start = time.perf_counter()
        run()
        return (time.perf_counter() - start) * 1000
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end))


def interleaved(
    runs: Mapping[str, Callable[[], object]], rounds: int, device: str, seconds: float
) -> dict[str, list[float]]:
    """Milliseconds of every round of each run, taken in turns whose order is reversed each round.

    Args:
        runs: what is timed, by name.
        rounds: at most, after those that warm up.
        device: "cuda" or "cpu".
        seconds: after which no round begins, once there are `FEWEST_ROUNDS`.
    """
    spent: dict[str, list[float]] = {name: [] for name in runs}
    end = time.monotonic() + seconds
    for index in range(rounds + WARM_ROUNDS):
        if index >= FEWEST_ROUNDS + WARM_ROUNDS and time.monotonic() > end:
            break
        order = list(runs) if index % 2 else list(reversed(runs))
        for name in order:
            spent[name].append(milliseconds(runs[name], device))
    return {name: found[WARM_ROUNDS:] for name, found in spent.items()}


def summary(rounds: Sequence[float]) -> dict[str, float]:
    """Median, and the quarters that say how far apart rounds are."""
    ordered = sorted(rounds)
    return {
        "ms": round(median(ordered), 4),
        "ms_low": round(ordered[len(ordered) // 4], 4),
        "ms_high": round(ordered[-1 - len(ordered) // 4], 4),
        "rounds": len(ordered),
    }


def repeated(calls: Sequence[Callable[[], object]], device: str, rounds: int = 7) -> float:
    """Milliseconds of one call, the median of rounds of `REPEATS` calls, taken in turns.

    Args:
        calls: the same work on copies of its operands.
        device: on "cuda" the calls of a round are one graph, so that nothing waits for Python.
        rounds: after one that warms up.
    """
    repeats = REPEATS if device == "cuda" else 3

    def all_of_them() -> None:
        for index in range(repeats):
            calls[index % len(calls)]()

    all_of_them()
    run: Callable[[], object] = all_of_them
    if device == "cuda":
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            all_of_them()
        run = graph.replay
    milliseconds(run, device)
    return median(milliseconds(run, device) for _ in range(rounds)) / repeats


def copies(size: int) -> int:
    """How many copies of operands of `size` bytes no cache holds."""
    return max(1, min(REPEATS, -(-COLD_BYTES // max(size, 1))))


class Memory:
    """Bytes of the device between two points; all zero on a CPU, where nobody counts them."""

    def __init__(self, device: str) -> None:
        self._on = device == "cuda"
        self._allocated, self._used = self._now()

    def _now(self) -> tuple[int, int]:
        if not self._on:
            return 0, 0
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        return torch.cuda.memory_allocated(), total - free

    def peak_of(self, run: Callable[[], object]) -> dict[str, int]:
        """What was taken since this was made, and at most while `run` runs.

        `peak` is torch's count, over what was allocated when this was made; `device` is the
        driver's, which sees what others than torch allocate too.
        """
        if not self._on:
            return {"peak": 0, "device": 0}
        torch.cuda.reset_peak_memory_stats()
        run()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - self._allocated
        return {"peak": peak, "device": self._now()[1] - self._used}
