"""Fills on Ray in processes of their own, and what is left of these."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from shutil import rmtree
from typing import Any

import psutil

INTERRUPTED = ("-W", "ignore:subprocess:ResourceWarning")
"""Ray does not wait for its daemons when it is interrupted, which only `-W error` shows."""

PATIENCE = 120.0
"""Seconds, on a machine that has much else to do."""


@dataclass
class RayRun:
    """`enginecast cache fill --engine ray`, with warnings as errors, in a session of its own.

    Args:
        folder: its home and its place for temporary files.
    """

    process: "subprocess.Popen[str]"
    folder: Path
    family: set[psutil.Process] = field(default_factory=set)
    """Every process that it was seen to start."""

    def until(self, happened: Callable[[], bool]) -> None:
        """Wait for something while the fill is at work."""
        self._look(lambda: happened() or self.process.poll() is not None)
        assert self.process.poll() is None, self.process.communicate()

    def end(self) -> tuple[int, str, str]:
        """Wait for the end; returns exit code, standard output and standard error."""
        self._look(lambda: self.process.poll() is not None)
        out, err = self.process.communicate()
        return self.process.returncode, out, err

    def workers(self) -> list[psutil.Process]:
        """The workers that have taken on a chunk."""
        return [one for one in self._living() if "ChunkFiller" in name_of(one)]

    def require_nothing_left(self) -> None:
        """No process remains, and nothing that Ray wrote."""
        assert len(self.family) > 5  # so that the test below can fail
        until = time.monotonic() + PATIENCE
        while self._living() or self._written():
            assert time.monotonic() < until, (self._living(), self._written())
            time.sleep(0.1)

    def _look(self, enough: Callable[[], bool]) -> None:
        until = time.monotonic() + PATIENCE
        while not enough():
            assert time.monotonic() < until, self.family
            try:
                self.family.update(psutil.Process(self.process.pid).children(recursive=True))
            except psutil.Error:
                continue
            time.sleep(0.05)

    def _written(self) -> list[Path]:
        return [*self.folder.glob("*ray*"), *self.folder.glob(".ray")]

    def _living(self) -> list[psutil.Process]:
        return [one for one in self.family if is_living(one)]


def is_living(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def name_of(process: psutil.Process) -> str:
    try:
        return str(process.name())
    except psutil.Error:
        return ""


@contextmanager
def ray_fill(*arguments: object) -> Iterator[RayRun]:
    """Start `enginecast cache fill ARGUMENTS --engine ray --workers 2`."""
    folder = Path(tempfile.mkdtemp(prefix="ec-", dir="/tmp"))  # Ray's sockets want a short path
    command = [sys.executable, "-W", "error", *INTERRUPTED, "-m", "enginecast", "cache", "fill"]
    command += [str(argument) for argument in arguments]
    environment: dict[str, Any] = {**os.environ, "TMPDIR": str(folder), "HOME": str(folder)}
    process = subprocess.Popen(
        [*command, "--engine", "ray", "--workers", "2"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    )
    run = RayRun(process, folder)
    try:
        yield run
    finally:
        process.kill()
        process.communicate()
        for one in run.family:
            if is_living(one):
                one.kill()
        rmtree(folder, ignore_errors=True)
