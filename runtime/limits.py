"""Limits of a run: time, memory, and how many runs are active at once."""

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from math import prod

import numpy as np

from enginecast.errors import MissingError, StoppedError, UsageError
from enginecast.runtime.bundle.manifest import Manifest
from enginecast.runtime.device.machine import available
from enginecast.runtime.sessions.session import Stop
from enginecast.runtime.values.device_tensor import Feed, shown_shapes

LARGE = 256 << 20
"""Bytes of outputs below which free memory is not checked: the check takes longer than some
runs."""


class Limits:
    """Tracks and limits the current runs of an engine: so many at once; None: any number."""

    def __init__(self, most: int | None = None) -> None:
        if most is not None and most < 1:
            raise UsageError(f"max_runs: expected at least 1, got {most}")
        self._most = most
        self._held = 0
        self._freed = threading.Condition()
        self._running: set[Stop] = set()

    def cancel(self) -> int:
        """Stop all current runs; return how many there were."""
        running = [*self._running]
        for one in running:
            one.stop("the run was canceled")
        return len(running)

    def run(self, timeout: float | None, stop: Stop | None = None) -> AbstractContextManager[Stop]:
        """Wait for a slot, and stop a run after `timeout` seconds, waiting included; `stop` lets
        another thread do so, too.
        """
        stop = stop or Stop()
        if timeout is None and self._most is None:
            return _Running(self._running, stop)
        return self._bounded(timeout, stop)

    @contextmanager
    def _bounded(self, timeout: float | None, stop: Stop) -> Iterator[Stop]:
        timer, late = None, ""
        with _Running(self._running, stop):
            try:
                if timeout is not None:
                    late = f"the run did not end in the {timeout:g} s that it was given"
                    timer = threading.Timer(timeout, stop.stop, [late])
                    timer.daemon = True
                    timer.start()
                if self._most is None:
                    yield stop
                    return
                self._take(self._most, timeout, stop, late)
                try:
                    yield stop
                finally:
                    with self._freed:
                        self._held -= 1
                        self._freed.notify_all()
            finally:
                if timer is not None:
                    timer.cancel()

    def _take(self, most: int, timeout: float | None, stop: Stop, late: str) -> None:
        """Wait for a slot, or until the run is stopped."""

        def wake() -> None:
            with self._freed:
                self._freed.notify_all()

        stop.set_act(wake)
        with self._freed:
            self._freed.wait_for(lambda: self._held < most or stop.reason, timeout)
            has_place = self._held < most and not stop.reason
            self._held += has_place
        stop.set_act(None)
        if has_place:
            return
        if stop.reason and stop.reason != late:
            raise StoppedError(stop.reason)
        raise StoppedError(
            f"none of the {most} runs in progress ended within {timeout:g} s",
            hint="Load the engine with a larger max_runs, or wait longer.",
        )


class _Running:
    """Context manager that registers a run. A generator-based one would take twice the time."""

    __slots__ = ("_running", "_stop")

    def __init__(self, running: set[Stop], stop: Stop) -> None:
        self._running, self._stop = running, stop

    def __enter__(self) -> Stop:
        self._running.add(self._stop)
        return self._stop

    def __exit__(self, *exception: object) -> None:
        self._running.discard(self._stop)


def require_memory(
    manifest: Manifest, feeds: Mapping[str, Feed], wanted: Sequence[str], *, on_gpu: bool
) -> bool:
    """Refuse sizes whose outputs alone are larger than the memory that this machine has left.

    A run needs more than its outputs, so only some of the runs that cannot succeed are refused.

    Returns:
        Whether these sizes need no further check, however little memory there is.
    """
    if on_gpu:  # its own runtime says what it lacks
        return True
    sizes: dict[int | str, int] = {}
    for spec in manifest.inputs:
        for declared, size in zip(spec.shape, feeds[spec.name].shape, strict=True):
            sizes[declared] = size
    needed = 0
    for output in manifest.outputs:
        if output.name in wanted:
            elements = prod(
                one if isinstance(one, int) else sizes.get(one, 1) for one in output.shape
            )
            needed += elements * np.dtype(output.dtype).itemsize
    if needed < LARGE:
        return True
    there = available()
    if there is not None and needed > there:
        raise MissingError(
            f"{shown_shapes(feeds)}: the outputs alone take {needed / 1e9:.1f} GB, and"
            f" {there / 1e9:.1f} GB of memory are free",
            hint="Give smaller batches, or ask for fewer outputs.",
        )
    return False
