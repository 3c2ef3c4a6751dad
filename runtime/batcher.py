"""Join the requests of many callers into batches, with a limit on how long each one waits."""

import os
import threading
import time
import warnings
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Self

from enginecast.errors import EnginecastError, EnginecastWarning, StoppedError, UsageError
from enginecast.runtime.engine import Encoded, Engine, Outputs
from enginecast.runtime.joining import Joining, Rows


@dataclass(eq=False)
class _Request:
    """What one caller waits for."""

    rows: Rows
    since: float = field(default_factory=time.monotonic)
    future: "Future[Outputs]" = field(default_factory=Future)


class Batcher:
    """Runs the requests of concurrent callers together, in batches.

    Requests are served first come, first served.  Texts of different lengths share a batch if the
    export proved that padding changes no other row (`manifest.padding`); other requests share one
    only with equal sizes.  Inputs are checked before a request waits, and a batch that fails runs
    again one request at a time, so that only the caller at fault gets the error.

    The first batch of several requests is compared with single runs.  If rows depend on each
    other, a warning says so, and requests run alone from then on.

    Args:
        engine: the engine; it stays open when the batcher is closed.
        max_batch: the largest number of rows in a batch; None: the engine's.
        max_delay: how many seconds a request waits for others, at most, while a worker is free.
        max_waiting: how many requests may wait at once.
        workers: how many batches run at once.

    Raises:
        UsageError: an argument is out of range, or the engine's inputs or outputs have no batch.

    Examples:
        >>> import enginecast, numpy
        >>> from enginecast.runtime import Batcher
        >>> with enginecast.load("linear.bundle") as engine, Batcher(engine) as batcher:
        ...     future = batcher.submit({"input": numpy.zeros((1, 8), "float32")})
        ...     future.result()["output_0"].shape
        (1, 2)
    """

    def __init__(
        self,
        engine: Engine,
        *,
        max_batch: int | None = None,
        max_delay: float = 0.005,
        max_waiting: int = 1024,
        workers: int = 1,
    ) -> None:
        if not isinstance(engine, Engine):
            raise UsageError(
                f"Batcher: expected an engine, got a {type(engine).__name__}",
                hint="enginecast.load opens one.",
            )
        for name, value in (("max_waiting", max_waiting), ("workers", workers)):
            if value < 1:
                raise UsageError(f"{name}: expected at least 1, got {value}")
        if not 0 <= max_delay < threading.TIMEOUT_MAX:
            raise UsageError(f"max_delay: expected seconds, 0 or more, got {max_delay}")
        self._engine = engine
        self._joining = Joining(engine.manifest, engine.record.precision)
        self._most = self._joining.most if max_batch is None else max_batch
        if not 1 <= self._most <= self._joining.most:
            raise UsageError(f"max_batch: expected 1..{self._joining.most}, got {max_batch}")
        self._delay, self._max_waiting = max_delay, max_waiting
        self._waiting: deque[_Request] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._process = os.getpid()
        self._joins: bool | None = None
        """Whether rows were seen not to depend on one another; None: nobody looked."""
        self._workers = [
            threading.Thread(target=self._work, name=f"enginecast-batcher-{number}", daemon=True)
            for number in range(workers)
        ]
        for worker in self._workers:
            worker.start()

    def __repr__(self) -> str:
        """The engine, and the limits."""
        state = ", closed" if self._closing else ""
        return (
            f"Batcher({str(self._engine.folder)!r}, {self._engine.backend}: at most {self._most}"
            f" rows, after {self._delay * 1000:g} ms{state})"
        )

    @property
    def joins(self) -> bool | None:
        """Whether requests run together; None before the first batch of several."""
        return self._joins

    def submit(self, feeds: Mapping[str, Any]) -> "Future[Outputs]":
        """Queue a request.

        Args:
            feeds: numpy arrays or CPU tensors by input name, as `Engine.run` takes them, with any
                number of rows.  Do not change them before the result is there.

        Returns:
            A future of these rows' outputs.  Canceling it removes the request from the queue.

        Raises:
            InputError: the feeds do not fit the declared inputs.
            StoppedError: too many requests are waiting.
            UsageError: the batcher is closed or of another process, or a tensor is on a GPU.
        """
        request = _Request(self._joining.rows(feeds))
        if os.getpid() != self._process:  # the threads stay behind
            raise UsageError(
                "the batcher was made in another process, which was forked",
                hint="Load the engine and make a batcher in each process.",
            )
        with self._changed:
            if self._closing:
                raise UsageError("the batcher is closed", hint="Make another one.")
            if len(self._waiting) >= self._max_waiting:
                raise StoppedError(
                    f"{len(self._waiting)} requests are already waiting, the maximum",
                    hint="Try again later, or make a batcher with a larger max_waiting.",
                )
            self._waiting.append(request)
            self._changed.notify_all()
        return request.future

    def run(self, feeds: Mapping[str, Any], *, timeout: float | None = None) -> Outputs:
        """Run a request, and wait for its outputs.

        Args:
            feeds: as `submit` takes them.
            timeout: how many seconds to wait, at most; None: no limit.

        Raises:
            StoppedError: it took longer than `timeout`, or too many requests are waiting.
            EnginecastError: as `Engine.run`.
        """
        future = self.submit(feeds)
        try:
            return future.result(timeout)
        except TimeoutError as error:
            future.cancel()
            raise StoppedError(f"the request did not finish in {timeout:g} s") from error

    async def run_async(self, feeds: Mapping[str, Any]) -> Outputs:
        """`run` for an event loop; canceling the task removes its request from the queue.

        Args:
            feeds: as `submit` takes them.

        Raises:
            EnginecastError: as `run`.
        """
        import asyncio  # with ssl and sockets, which most who run engines do without

        return await asyncio.wrap_future(self.submit(feeds))

    def encode(self, texts: str | Sequence[str], *, timeout: float | None = None) -> Encoded:
        """Run a request of texts; see `Engine.encode`.

        Args:
            texts: one, or several.
            timeout: seconds to wait at most; None: any time.

        Raises:
            EnginecastError: as `Engine.encode` and `run`.
        """
        return self._engine.encode(texts, run=lambda feeds: self.run(feeds, timeout=timeout))

    def close(self) -> None:
        """Serve the waiting requests, and end the threads; calling it twice is harmless."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        for worker in self._workers:
            if worker is not threading.current_thread():
                worker.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _work(self) -> None:
        while (group := self._next()) is not None:
            group = [one for one in group if one.future.set_running_or_notify_cancel()]
            try:
                ran = len(group) > 1 and self._together(group)
            except BaseException:  # a thread that ends leaves those who wait for ever
                ran = False
            for one in () if ran else group:
                if not one.future.done():
                    try:
                        one.future.set_result(self._engine.run(one.rows.feeds))
                    except BaseException as error:  # the caller's to handle, whatever it is
                        one.future.set_exception(error)

    def _next(self) -> list[_Request] | None:
        """The oldest request and those that run with it; None: there will be none."""
        with self._changed:
            while True:
                while not self._waiting:
                    if self._closing:
                        return None
                    self._changed.wait()
                group = self._group(self._waiting[0])
                left = group[0].since + self._delay - time.monotonic()
                is_full = sum(one.rows.count for one in group) >= self._most
                if is_full or left <= 0 or self._closing or self._joins is False:
                    for one in group:
                        self._waiting.remove(one)
                    return group
                self._changed.wait(left)  # another worker may take it meanwhile

    def _group(self, first: _Request) -> list[_Request]:
        """Requests that run with the first, in the order in which they came."""
        group, count = [first], first.rows.count
        for one in self._waiting:
            if one is first or one.rows.key != first.rows.key or one.future.cancelled():
                continue
            if self._joins is False or count + one.rows.count > self._most:
                break
            group.append(one)
            count += one.rows.count
        return group

    def _together(self, group: Sequence[_Request]) -> bool:
        """Run requests as one batch; False: they have to run alone."""
        rows = [one.rows for one in group]
        feeds = self._joining.join(rows)
        if feeds is None:
            return False
        try:
            found = self._engine.run(feeds)
        except Exception:  # of one of them, who gets it when it runs alone
            return False
        parts = self._joining.part(found, rows)
        if self._joins is None:
            with suppress(EnginecastWarning):  # where warnings are errors; no thread may end of it
                self._compare(group, parts)
            if not self._joins:
                return False
        for one, part in zip(group, parts, strict=True):
            one.future.set_result(Outputs(part, found.backend))
        return True

    def _compare(self, group: Sequence[_Request], parts: Sequence[Mapping[str, Any]]) -> None:
        """Find out whether rows depend on those beside them."""
        for one, part in zip(group, parts, strict=True):
            try:
                single = self._engine.run(one.rows.feeds)
            except EnginecastError:
                continue  # it is given again with the result
            if difference := self._joining.difference(one.rows, single, part):
                self._joins = False
                warnings.warn(
                    f"{self._engine.folder}: a row has different outputs in a batch than alone"
                    f" ({difference}), so requests run one by one",
                    EnginecastWarning,
                    stacklevel=2,
                )
                return
        self._joins = True
