"""Record TensorRT's messages about a failure, for the error that the user sees.

Its calls answer None or False; the reason goes to an error recorder, and to the logger.
"""

import threading
from typing import Any

_KEPT = 20
"""Messages: the first ones name the cause."""


class Messages:
    """Messages reported since they were last taken; several threads may report."""

    def __init__(self) -> None:
        self._found: list[tuple[Any, str]] = []
        self._dropped = False
        self._lock = threading.Lock()

    def add(self, code: Any, text: str) -> None:
        with self._lock:
            if len(self._found) < _KEPT:
                self._found.append((code, text))
            else:
                self._dropped = True

    def take(self) -> str:
        """All of them as one line, which are forgotten then."""
        with self._lock:
            texts = [text.strip() for _, text in self._found]
            found = "; ".join(dict.fromkeys(texts)) or "it gave no reason"
            found += "; and more" if self._dropped else ""
            self._found, self._dropped = [], False
            return " ".join(found.split())

    def clear(self) -> None:
        with self._lock:
            self._found, self._dropped = [], False

    def __len__(self) -> int:
        return len(self._found)

    def __getitem__(self, index: int) -> tuple[Any, str]:
        return self._found[index]

    @property
    def overflowed(self) -> bool:
        return self._dropped


def error_recorder(trt: Any, messages: Messages) -> Any:
    """A recorder for a Builder, Runtime, Refitter or IExecutionContext; keep a reference to it."""

    class Recorder(trt.IErrorRecorder):  # type: ignore[misc]  # known when it runs
        def __init__(self) -> None:
            trt.IErrorRecorder.__init__(self)

        def report_error(self, code: Any, text: str) -> bool:
            messages.add(code, text)
            return False  # not known to be fatal: TensorRT decides what goes on

        def num_errors(self) -> int:
            return len(messages)

        def get_num_errors(self) -> int:
            # The bindings look for this name in Python, and document the other one: without it
            # TensorRT 10.15 and 11.0 print "Tried to call pure virtual function".
            return len(messages)

        def get_error_code(self, index: int) -> Any:
            return messages[index][0]

        def get_error_desc(self, index: int) -> str:
            return messages[index][1]

        def has_overflowed(self) -> bool:
            return messages.overflowed

        def clear(self) -> None:
            messages.clear()

    return Recorder()


def error_logger(trt: Any, messages: Messages) -> Any:
    """A logger that prints nothing; keep a reference to it."""

    class Logger(trt.ILogger):  # type: ignore[misc]  # known when it runs
        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, msg: str) -> None:
            if severity in (trt.ILogger.ERROR, trt.ILogger.INTERNAL_ERROR):
                messages.add(trt.ErrorCodeTRT.UNSPECIFIED_ERROR, msg)

    return Logger()
