"""Fills in processes of their own, to be killed."""

import multiprocessing
import resource
import signal
from collections.abc import Callable
from typing import Protocol


class Running(Protocol):
    """A fill in a process of its own."""

    @property
    def pid(self) -> int | None: ...

    def kill(self) -> None: ...

    def wait(self) -> int:
        """Its exit code, once it has ended."""
        ...


Start = Callable[..., Running]


class Forked:
    """A process forked from one that has imported everything: a start takes milliseconds.

    Args:
        arguments: of `cache fill`.
        file_size: bytes beyond which no file may grow, as on a disk that fails.
    """

    _context = multiprocessing.get_context("forkserver")
    _context.set_forkserver_preload(["enginecast.cli.app", "enginecast.cli.cache.fill"])

    def __init__(self, *arguments: object, file_size: int | None = None) -> None:
        words = ["cache", "fill", *map(str, arguments), "--quiet"]
        self._process = self._context.Process(target=_main, args=(words, file_size))
        self._process.start()

    @property
    def pid(self) -> int | None:
        return self._process.pid

    def kill(self) -> None:
        self._process.kill()

    def wait(self) -> int:
        self._process.join()
        assert self._process.exitcode is not None
        return self._process.exitcode


def _main(words: list[str], file_size: int | None) -> None:
    # A shell lets what it starts in the background ignore interrupts, and tests may run there.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if file_size is not None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_size, file_size))
    from enginecast.cli.app import main

    main(words)
