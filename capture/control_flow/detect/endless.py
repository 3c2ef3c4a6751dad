"""Stop a run of the model's code that does not terminate.

The recorder stops a loop that reads tensors (`recorder.MOST_READS`). A loop that reads none, such
as `while True`, is stopped by the clock: a thread looks at where the run is, and raises in it.
"""

import ctypes
import linecache
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType

from enginecast.capture.python.locations import SourceLocation, is_model_code, origin_of
from enginecast.errors import CaptureError

LONGEST_TRACE = 300.0
"""Seconds that a forward may take on fake tensors, which compute nothing; the largest traced models
take a minute."""
LONGEST_RUN = 1800.0
"""Seconds that a forward may take on real tensors."""
_TICK = 15.0
"""Seconds between checks once the time is over."""
_AGAIN = 30.0
"""Seconds until the error is raised again, if a bare `except` swallowed it. Sooner, it could
interrupt the clean-up of torch's modes."""
_ENTERING = ("__enter__", "enter_context")
"""Functions that return before the run begins."""


class _Stop(BaseException):
    """Raised in the run; a BaseException, so that no `except Exception` catches it."""


class Bounded:
    """`with Bounded(300): module(**inputs)` ends after 300 to 600 seconds in the model's code.

    The run is not looked at before that time is over. A thread that reads another thread's frames
    keeps their locals alive, and torch.export then loses track of tensors: on a busy machine, one
    T5 in a hundred was refused ("does not see how the model makes a tensor").

    What a library does around and after the model's code is not counted. A call that blocks outside
    of Python, such as `time.sleep`, is stopped only when it returns.

    Args:
        seconds: limit for the outermost function of the model's code.

    Raises:
        CaptureError: on exit, if the limit was exceeded; names the current line.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._tick = min(_TICK, seconds / 4)
        self._is_over = threading.Event()
        self._stuck: tuple[SourceLocation, SourceLocation] | None = None
        self._is_lost = False
        self._report: Callable[[sys.UnraisableHookArgs], object] = sys.unraisablehook

    def __enter__(self) -> "Bounded":
        self._run = threading.get_ident()
        self._report, sys.unraisablehook = sys.unraisablehook, self._notice
        self._outside: FrameType | None = sys._getframe(1)
        while self._outside is not None and self._outside.f_code.co_name in _ENTERING:
            self._outside = self._outside.f_back
        self._watch = threading.Thread(target=self._look, name="bounded", daemon=True)
        self._watch.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        while True:
            try:
                self._is_over.set()
                self._watch.join()
                _settle()
                break
            except _Stop:  # it came when the run had ended, or once more
                continue
        sys.unraisablehook = self._report
        self._outside = None
        if isinstance(error, _Stop) and self._stuck is not None:
            raise _endless(*self._stuck, self._seconds) from None

    def _look(self) -> None:
        current: FrameType | None = None
        since = 0.0
        if self._is_over.wait(self._seconds):
            return
        while not self._is_over.wait(self._tick):
            frames = self._frames()
            outermost = frames[-1] if frames else None
            if outermost is not current or outermost is None:
                current, since = outermost, time.monotonic()
            elif self._is_lost or time.monotonic() - since >= self._seconds:
                # torch runs exec'd code of its own around a model.
                named = [f for f in frames if is_model_code(f.f_code.co_filename)] or frames
                ends = SourceLocation.of_frame(named[0]), SourceLocation.of_frame(named[-1])
                self._stuck = self._stuck or ends
                since += 0 if self._is_lost else _AGAIN
                self._is_lost = False
                # Never to take one back: where none is pending, CPython 3.11 is left checking for
                # good, and a thread with a profiler hangs.
                thread, kind = ctypes.c_ulong(self._run), ctypes.py_object(_Stop)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, kind)

    def _notice(self, unraisable: "sys.UnraisableHookArgs", /) -> object:
        """Python drops what is raised in a destructor or in the callback of a weak reference."""
        if unraisable.exc_type is not _Stop:
            return self._report(unraisable)
        self._is_lost = True
        return None

    def _frames(self) -> list[FrameType]:
        """The frames of the model's code, innermost first."""
        frame = sys._current_frames().get(self._run)
        found = []
        while frame is not None and frame is not self._outside:
            file = frame.f_code.co_filename
            if is_model_code(file) or origin_of(file) == "exec":
                found.append(frame)
            frame = frame.f_back
        return found


def _endless(inner: SourceLocation, outer: SourceLocation, seconds: float) -> CaptureError:
    where = "" if inner == outer else f", called from {outer},"
    code = linecache.getline(*inner).strip() or "(the source of this line is not available)"
    return CaptureError(
        f"{inner}\n    {code}\nthe model's forward{where} still ran after {seconds:g} s: a "
        "loop around this line has no end, or far too many rounds",
        hint="Bound the loop, or give inputs with which it ends: --inputs FILE.",
    )


def _settle() -> None:
    """A no-op call, at which Python raises a pending exception."""
