"""Ray for the time of one fill: one of its own on this machine, or a cluster that is there.

Its own Ray tells nobody that it is used, prints nothing, writes nothing outside a folder that goes
with it, asks whoever connects for a token, and leaves no process behind; see `fill_ray_reaper`.
"""

import io
import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import uuid
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from functools import cache
from pathlib import Path
from typing import Any

from enginecast.cache import fill_ray_reaper
from enginecast.errors import MissingError, UsageError

_log = logging.getLogger(__name__)

_LEAST_STORE = 80 << 20
"""Bytes: the smallest object store that Ray takes is 75 MB."""

_SHORT = 40
"""Letters of a temporary folder; Ray makes sockets below it, whose paths have at most 107."""

_ANSWER_SECONDS = 10.0

_QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_BACKEND_LOG_LEVEL": "fatal",  # of this process's C++ part, which logs to standard error
    "RAY_DISABLE_FAILURE_SIGNAL_HANDLER": "1",  # else SIGTERM aborts, with a dump of the stack
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",  # else `uv run` makes it upload the working folder
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # else each worker without a GPU warns of a change
}


@cache
def _token() -> str:
    """One for all sessions of this process: Ray reads it once."""
    return secrets.token_hex(32)


@contextmanager
def local_ray(cpus: int, store_bytes: int) -> Iterator[None]:
    """Start Ray on this machine; end all of it, however the block or this process ends.

    Args:
        cpus: that it may give to workers.
        store_bytes: size of the object store, about.

    Raises:
        MissingError: Ray is not installed, or does not start.
    """
    name = uuid.uuid4().hex
    variables = {
        **_QUIET,
        "RAY_AUTH_MODE": "token",  # Ray listens on all interfaces
        "RAY_AUTH_TOKEN": _token(),
        "SPT_NOENV": "1",  # renamed processes keep their environment, by which they are found
        fill_ray_reaper.SESSION: name,
    }
    with _environment(variables), _no_notices():
        ray = _import_ray()
        with _quiet_loggers(), _reaped(name) as folder, _restored_handlers():
            try:
                with _no_standard_error():
                    ray.init(
                        "local",
                        num_cpus=cpus,
                        include_dashboard=False,
                        object_store_memory=max(_LEAST_STORE, store_bytes),
                        log_to_driver=False,
                        configure_logging=False,
                        _node_ip_address="127.0.0.1",
                        _temp_dir=str(folder),
                    )
                _end_on_sigterm()
                yield
            finally:
                ray.shutdown()


@contextmanager
def attached_ray(address: str) -> Iterator[None]:
    """Connect to a cluster; disconnect in the end, and leave it as it is.

    Raises:
        MissingError: Ray is not installed.
        UsageError: nobody answers there, or another version of Ray or Python.
    """
    if address.startswith("ray://"):
        raise UsageError(
            f"--ray-address {address}: Ray's client cannot run this",
            hint="Start the fill on a machine of the cluster, with --ray-address auto.",
        )
    _require_answer(address)
    with _environment(_QUIET), _no_notices():
        ray = _import_ray()
        with _quiet_loggers(), _restored_handlers():
            try:
                with _no_standard_error():
                    ray.init(address, log_to_driver=False, configure_logging=False)
            except (ConnectionError, RuntimeError, ValueError) as error:
                raise UsageError(
                    f"--ray-address {address}: {str(error).strip()}",
                    hint="`ray status` on a machine of the cluster says whether it runs.",
                ) from error
            try:
                _end_on_sigterm()
                yield
            finally:
                ray.shutdown()


def _require_answer(address: str) -> None:
    """Ray itself tries for five minutes."""
    host, _, port = address.rpartition(":")
    if not (host and port.isdigit()):
        return
    try:
        socket.create_connection((host, int(port)), _ANSWER_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise UsageError(
            f"--ray-address {address}: nobody answers: {error}",
            hint="`ray status` on a machine of the cluster says whether it runs.",
        ) from error


def _import_ray() -> Any:
    try:
        import ray
        import ray.data
    except ImportError as error:
        raise MissingError(
            f"--engine ray needs Ray Data, which cannot be imported: {error}",
            hint="pip install 'enginecast[ray]'",
        ) from error
    return ray


@contextmanager
def _reaped(name: str) -> Iterator[Path]:
    """A folder for a session, whose processes and folder end with the block or this process."""
    import psutil  # which Ray brings

    short = tempfile.gettempdir()
    base = short if len(short) <= _SHORT else "/tmp"
    folder = tempfile.mkdtemp(prefix="enginecast-ray-", dir=base)
    own = {key: value for key, value in os.environ.items() if key != fill_ray_reaper.SESSION}
    with subprocess.Popen(
        [sys.executable, "-P", fill_ray_reaper.__file__, name, folder],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**own, "PYTHONPATH": str(Path(psutil.__file__).parents[1])},
        start_new_session=True,  # Ctrl-C is for the driver
    ):
        yield Path(folder)  # then the pipe is closed and the process waited for


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _end_on_sigterm() -> None:
    """By an exception, so that Ray is ended; and with the shell's code, and not Ray's."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))


@contextmanager
def _restored_handlers() -> Iterator[None]:
    """Ray puts in handlers of its own, and so do we."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _no_notices() -> Iterator[None]:
    """Ray prints notices of dead workers to standard output, where results go: to our log."""
    with warnings.catch_warnings(), redirect_stdout(_Logged()):
        warnings.filterwarnings("ignore", module=r"ray(\.|$)")
        yield


@contextmanager
def _quiet_loggers() -> Iterator[None]:
    """Nothing of Ray's own progress.  For after its import, which configures its loggers."""
    loggers = [logging.getLogger(name) for name in ("ray", "ray.data")]
    before = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)


class _Logged(io.TextIOBase):
    """Standard output whose lines become debug messages."""

    def write(self, text: str) -> int:
        for line in text.splitlines():
            if line.strip():
                _log.debug("%s", line)
        return len(text)


@contextmanager
def _no_standard_error() -> Iterator[None]:
    """Ray's C++ part says there that it was told to say nothing."""
    sys.stderr.flush()
    before = os.dup(2)
    try:
        with open(os.devnull, "wb") as nothing:
            os.dup2(nothing.fileno(), 2)
        yield
    finally:
        os.dup2(before, 2)
        os.close(before)
