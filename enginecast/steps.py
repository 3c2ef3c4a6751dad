"""The steps of a command: a spinner on a terminal, a time for each, the lines of the build log."""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console

logger = logging.getLogger(__name__)

LONG = 1.0
"""Seconds from which on a step is told of: a log that nobody watches has no spinner."""


class Steps:
    """Times what happens inside `with steps("capture"):`.

    Args:
        console: where progress is shown (standard error); None: nowhere.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = console
        self.seconds: dict[str, float] = {}
        self.lines: list[str] = []

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            if self._console is not None and self._console.is_terminal:
                with self._console.status(name):
                    yield
            else:
                yield
        finally:
            spent = time.perf_counter() - start
            self.seconds[name] = self.seconds.get(name, 0.0) + spent
            (self.say if spent > LONG else self.log)(f"{name}: {spent:.2f} s")

    def log(self, line: str) -> None:
        """Add a line to the build log."""
        self.lines.append(line)
        logger.info("%s", line)

    def say(self, line: str) -> None:
        """Add a line to the build log and show it."""
        if self._console is None or self._console.quiet:
            self.log(line)
            return
        self.lines.append(line)  # and not to the logger, which may show it on the same terminal
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)
