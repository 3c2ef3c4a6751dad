"""Progress of a TensorRT build, and how to stop it.

TensorRT calls back from C++, where an exception of Python must not go: what is raised in a callback
is kept, the build is asked to stop, and it is raised again after the build has returned.
https://docs.nvidia.com/deeplearning/tensorrt/latest/_static/python-api/infer/Core/ProgressMonitor.html
"""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

Tell = Callable[[str, int, int], None]


class Watch:
    """Whether a build should continue; keeps the first reason to stop."""

    def __init__(self, tell: Tell) -> None:
        self._tell = tell
        self.reason: BaseException | None = None
        self.monitor: Any = None
        """A tensorrt.IProgressMonitor for the builder's config."""

    def stop(self, reason: BaseException) -> None:
        self.reason = self.reason or reason

    def report(self, phase: str, done: int, total: int) -> None:
        try:
            self._tell(phase, done, total)
        except BaseException as error:  # whatever it is must not reach C++
            self.stop(error)

    def require_not_stopped(self) -> None:
        """Raise what stopped the build: KeyboardInterrupt, or what `tell` raised."""
        if self.reason is not None:
            raise self.reason


@contextmanager
def watched(trt: Any, tell: Tell) -> Iterator[Watch]:
    """A watch over one build; meanwhile Ctrl-C stops it after its current step.

    Args:
        trt: the module tensorrt.
        tell: gets the name of a phase, the steps that are done, and their number.
    """
    watch = Watch(tell)
    totals: dict[str, int] = {}

    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]  # known when it runs
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            totals[phase_name] = num_steps
            watch.report(phase_name, 0, num_steps)

        def step_complete(self, phase_name: str, step: int) -> bool:
            watch.report(phase_name, step + 1, totals.get(phase_name, step + 1))
            return watch.reason is None

        def phase_finish(self, phase_name: str) -> None:
            totals.pop(phase_name, None)

    watch.monitor = Monitor()
    with _interrupts(watch):
        yield watch


@contextmanager
def _interrupts(watch: Watch) -> Iterator[None]:
    """Take Ctrl-C as a wish to stop; Python tells only the main thread of it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        watch.stop(KeyboardInterrupt())

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
