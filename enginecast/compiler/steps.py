"""The steps of a command: progress, time and memory of each step, and the build log."""

import logging
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from enginecast.compiler.memory import trim, watched
from enginecast.progress import Loop, listening

if TYPE_CHECKING:
    from enginecast.passes.ir.pipeline import PassRun

logger = logging.getLogger(__name__)

LONG = 1.0
"""Seconds from which on a step is printed where there is no spinner."""
SLOW = 10.0
"""Seconds from which on a step says what is left of it."""
MUCH = 2_000_000_000
"""Bytes of anonymous memory from which on memory is reported."""


class _Listener(logging.Handler):
    """Log handler that collects the warnings and errors of libraries in a list."""

    def __init__(self, lines: list[str]) -> None:
        super().__init__(logging.WARNING)
        self._lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append(f"{record.levelname.lower()} of {record.name}: {record.getMessage()}")


class Steps:
    """Measures time and memory inside `with steps("capture"):`, and shows progress on a console."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console
        self.seconds: dict[str, float] = {}
        self.memory: dict[str, int] = {}
        """Step -> most bytes of anonymous memory at once; 0 where there is no /proc."""
        self.lines: list[str] = []
        self.shown: set[str] = set()
        """Lines that stand on the console already."""
        self._progress: Progress | None = None
        self._build = Loop("", 0)
        """The phase of a build that `tell` was told of last."""

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            with watched() as peak, self._shown(name):
                yield
        finally:
            trim()
            spent = time.perf_counter() - start
            self.seconds[name] = self.seconds.get(name, 0.0) + spent
            self.memory[name] = max(self.memory.get(name, 0), peak.anonymous)
            line = f"{name}: {spent:.2f} s"
            if peak.anonymous > MUCH:
                line = f"{line}, {peak.anonymous / 1e9:.1f} GB of memory"
            (self.say if spent > LONG else self.log)(line)

    @contextmanager
    def _shown(self, name: str) -> Iterator[None]:
        if self.console is None or self.console.quiet or not self.console.is_terminal:
            yield
            return
        columns = (SpinnerColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
        with Progress(*columns, console=self.console, transient=True) as shown:
            shown.add_task(name, total=None)
            self._progress, start = shown, time.monotonic()

            def tell(loops: Sequence[Loop]) -> None:
                now = time.monotonic()  # one that does not go on for long says nothing of it
                loop = next((loop for loop in loops if now - loop.round < SLOW), loops[-1])
                text = f"{name}: {loop.done} of {loop.total} {loop.what}"
                shown.update(shown.task_ids[0], description=text + _what_is_left(loop, start))

            try:
                with listening(tell):
                    yield
            finally:
                self._progress = None

    def tell(self, phase: str, done: int, total: int) -> None:
        """Show the progress of a long build; on a terminal only."""
        if self._progress is None:
            return
        if phase != self._build.what:
            self._build = Loop(phase, total)
        self._build.done = done
        text = f"{phase}: {done} of {total}{_what_is_left(self._build, self._build.start)}"
        self._progress.update(self._progress.task_ids[0], description=text)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Within the block, warnings from Python and from libraries go to the build log, too."""
        show = warnings.showwarning
        handler = _Listener(self.lines)

        def heard(message: Warning | str, *where: Any, **more: Any) -> None:
            self.lines.append(f"warning: {message}")
            show(message, *where, **more)

        # torch keeps its log to itself.
        heard_at = [logging.root, logging.getLogger("torch")]
        for place in heard_at:
            place.addHandler(handler)
        warnings.showwarning = heard
        try:
            yield
        finally:
            warnings.showwarning = show
            for place in heard_at:
                place.removeHandler(handler)

    def log(self, line: str) -> None:
        """Add a line to the build log."""
        self.lines.append(line)
        logger.info("%s", line)

    def log_passes(self, runs: Iterable["PassRun"]) -> None:
        """Add a line for each pass to the build log."""
        for run in runs:
            left = len(run.sites) - run.rewritten
            self.log(
                f"pass {run.pass_.name}: {run.rewritten} rewritten, {left} left alone,"
                f" {run.seconds:.3f} s"
            )

    def say(self, line: str) -> None:
        """Add a line to the build log and show it; a line that a second attempt says again once."""
        if line in self.shown:
            return
        if self.console is None or self.console.quiet:
            self.log(line)
            return
        self.shown.add(line)
        self.lines.append(line)  # and not to the logger, which may show it on the same terminal
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)


def _what_is_left(loop: Loop, start: float) -> str:
    """The time that a loop still takes, about, if its step takes long.

    Args:
        start: of the step, by `time.monotonic`.
    """
    left = loop.left
    if left is None or time.monotonic() - start + left < SLOW:
        return ""
    return f", about {left:.0f} s left" if left < 100 else f", about {left / 60:.0f} min left"
