"""Times of several calls, taken in turns: what else the machine does meets all of them alike."""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median, quantiles
from typing import TypeVar

SHORTEST = 2e-3
"""Seconds of one sample; a call that takes less is repeated within it."""
WARM_UPS = 2
"""Calls of each before the first sample, where nobody says otherwise."""
FEWEST = 3
"""Rounds, whatever they take."""
QUIET = 0.2
"""Part of a core that a process takes at most, in which no thread of a pool spins."""
PATIENCE = 100
"""Milliseconds that are waited for that; pools spin for some tens."""

K = TypeVar("K")
Clock = Callable[[Callable[[], object], int], float]
"""Seconds that so many calls take."""


@dataclass(frozen=True)
class Times:
    """Samples of one call, in milliseconds."""

    wall: tuple[float, ...]
    cpu: tuple[float, ...]
    """Of all threads of the process."""
    calls: int
    """That one sample is the mean of."""

    @property
    def median(self) -> float:
        return median(self.wall)

    @property
    def median_cpu(self) -> float:
        return median(self.cpu)

    @property
    def spread(self) -> tuple[float, float]:
        """The quartiles."""
        if len(self.wall) < 2:
            return self.wall[0], self.wall[0]
        low, _, high = quantiles(self.wall, n=4, method="inclusive")
        return low, high

    def over(self, base: "Times") -> "Times":
        """How many times faster than `base` it was in each round, sample beside sample."""
        pairs = (zip(base.wall, self.wall, strict=True), zip(base.cpu, self.cpu, strict=True))
        wall, cpu = (tuple(one / max(two, 1e-9) for one, two in each) for each in pairs)
        return Times(wall, cpu, self.calls)


def ratio(base: Times, other: Times) -> float:
    """How many times faster than `base` another is: the median over rounds."""
    return other.over(base).median


def wall_clock(call: Callable[[], object], times: int) -> float:
    """Seconds by the clock on the wall."""
    start = time.perf_counter()
    for _ in range(times):
        call()
    return time.perf_counter() - start


def interleaved(
    calls: Mapping[K, Callable[[], object]],
    *,
    rounds: int,
    seconds: float = math.inf,
    clock: Clock = wall_clock,
    warm_ups: int = WARM_UPS,
) -> dict[K, Times]:
    """Time each call once a round; the order turns around every other round.

    Threads that spin behind one call are waited for before the next one.

    Args:
        rounds: at most.
        seconds: that all of it may take, about; `FEWEST` rounds are made in any case.
        clock: measures a sample; the CPU's time is measured around it.
        warm_ups: calls of each before the first sample, of which the last sets the repetitions.
    """
    end = time.monotonic() + seconds
    counts = {}
    for name, call in calls.items():
        for _ in range(warm_ups - 1):
            call()
        counts[name] = max(1, math.ceil(SHORTEST / max(clock(call, 1), 1e-9)))
    samples: dict[K, list[tuple[float, float]]] = {name: [] for name in calls}
    for turn in range(rounds):
        if turn >= FEWEST and time.monotonic() > end:
            break
        for name in list(calls)[:: -1 if turn % 2 else 1]:
            _settle()
            if counts[name] > 1:  # wake them again
                calls[name]()
            before = time.process_time()
            taken = clock(calls[name], counts[name])
            used = time.process_time() - before
            samples[name].append((1e3 * taken / counts[name], 1e3 * used / counts[name]))
    return {
        name: Times(tuple(wall for wall, _ in found), tuple(cpu for _, cpu in found), counts[name])
        for name, found in samples.items()
    }


def _settle() -> None:
    """Wait until no thread of this process spins for work that does not come."""
    for _ in range(PATIENCE):
        before = time.process_time()
        time.sleep(1e-3)
        if time.process_time() - before < QUIET * 1e-3:
            return
