"""Record TensorRT's messages about a failure, for the error that the user sees.

Its calls answer None or False; the reason goes to the logger.
"""

import threading
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

_KEPT = 20
"""Messages: the first ones name the cause."""
_NO_DRIVER = "cudaError 35:"


class Messages:
    """Messages reported since they were last taken; several threads may report."""

    def __init__(self) -> None:
        self.warnings: deque[str] = deque(maxlen=_KEPT)
        self._found: list[str] = []
        self._dropped = False
        self._lock = threading.Lock()

    def add(self, text: str) -> None:
        with self._lock:
            if len(self._found) < _KEPT:
                self._found.append(text.strip())
            else:
                self._dropped = True

    def take(self) -> str:
        """All of them as one line, which are forgotten then."""
        with self._lock:
            found = "; ".join(causes(dict.fromkeys(self._found))) or "it gave no reason"
            found += "; and more" if self._dropped else ""
            self._found, self._dropped = [], False
            return " ".join(found.split())

    def clear(self) -> None:
        with self._lock:
            self._found, self._dropped = [], False

    def __bool__(self) -> bool:
        return bool(self._found)


def causes(lines: Iterable[str]) -> list[str]:
    """Messages, without the one that TensorRT-RTX adds to each error where there is no driver."""
    found = list(lines)
    known = [line for line in found if "catchCudaError" not in line or _NO_DRIVER not in line]
    return known or found


_thread = threading.local()


@contextmanager
def heard_by(messages: Messages) -> Iterator[None]:
    """A context in which this thread's errors go there."""
    before = getattr(_thread, "messages", None)
    _thread.messages = messages
    try:
        yield
    finally:
        _thread.messages = before


def error_logger(trt: Any, messages: Messages) -> Any:
    """The logger of this process, which prints nothing.

    A library keeps the first logger that it is given, for as long as anything made with it lives,
    and ignores all others with a warning.  There is no error recorder beside it: with one, the
    process ends in a segmentation fault when its network is freed.  (Both: TensorRT-RTX 1.7.1.)

    Args:
        messages: gets what threads of the library's own report from now on.
    """
    logger = _logger(trt)
    logger.messages = messages
    return logger


@cache
def _logger(trt: Any) -> Any:
    class Logger(trt.ILogger):  # type: ignore[misc]  # known when it runs
        messages: Messages

        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, msg: str) -> None:
            of_thread = getattr(_thread, "messages", None)
            messages = self.messages if of_thread is None else of_thread
            if severity in (trt.ILogger.ERROR, trt.ILogger.INTERNAL_ERROR):
                messages.add(msg)
            elif severity == trt.ILogger.WARNING:
                messages.warnings.append(msg)

    return Logger()
