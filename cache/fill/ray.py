"""A fill by several workers at once, on Ray Data: on this machine, or on a cluster.

A call of `map_batches` gets one chunk and commits it: what Ray does again when a worker dies is
a whole chunk, whose entries are looked for first, under names that follow from their keys.  So the
contents are as if each was done once.  The outputs go to the disk where they are made, and never
through Ray: what a worker hands back is names of shards, counts and failures.
"""

import io
import logging
import os
import pickle
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import uuid
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, replace
from os import cpu_count
from pathlib import Path
from typing import Any, NamedTuple

from enginecast.cache.encoders.open_encoder import Encoder, open_encoder
from enginecast.cache.encoders.request import EncoderRequest
from enginecast.cache.fill import ray_reaper
from enginecast.cache.fill.local import Done, Filled, Progress, fill_chunk
from enginecast.cache.fill.schedule import Chunk, FillSchedule
from enginecast.cache.store.claims import claim, sweep
from enginecast.cache.store.folders import Encodings, open_store
from enginecast.cache.store.spec import EncoderSpec, differences
from enginecast.errors import CacheError, EnginecastError, MissingError, UsageError
from enginecast.installation import required

_CHUNK, _OUTCOME = "chunk", "outcome"
"""Columns of what goes in, and of what comes out: pickles."""
_ROOM = 64 << 20
"""Bytes of the object store beyond the texts, for what Ray puts there itself."""
_MOST_DEATHS = 3
"""Workers that may die over a chunk, before it is taken to be what kills them."""
_PATIENCE = 0.5
"""Seconds between two tries to get a chunk that another fill is at."""


@dataclass(frozen=True)
class Job:
    """A fill, as every worker needs it.

    Args:
        ident: tells it from other fills on the same cluster.
        cache: path of the cache, and `store` what the driver found to be its id.
        name, spec: of the encoder that the driver opened.
        request: to open it again, with absolute paths.
        abroad: whether workers may be on other machines, which errors then name.
    """

    ident: str
    cache: str
    store: str
    name: str
    spec: EncoderSpec
    request: EncoderRequest
    batch_tokens: int
    abroad: bool


@dataclass(frozen=True)
class _Outcome:
    """What became of a chunk: what was stored, its texts, and the bytes of their outputs."""

    done: Done
    texts: int = 0
    size: int = 0
    error: EnginecastError | RuntimeError | None = None
    """To be raised by the driver; Ray would wrap it in tracebacks of its own."""


class Share(NamedTuple):
    """How many workers there are, and the CPUs and GPUs that each of them has."""

    workers: int
    cpus: int
    gpus: int


def fill_with_ray(
    encodings: Encodings,
    request: EncoderRequest,
    schedule: FillSchedule,
    *,
    batch_tokens: int,
    workers: int | None = None,
    address: str | None = None,
    progress: Progress | None = None,
) -> Filled:
    """Encode what the cache lacks, and store it.

    Args:
        request: opens the encoder that the schedule was made for.
        workers: encoders at work at once; None: one for each GPU, or for each machine on the CPU.
        address: of a running cluster; None: a Ray of its own on this machine.
        progress: called after each chunk.

    Raises:
        MissingError: Ray, a GPU, memory or disk is lacking.
        UsageError: no cluster there; more workers than fit.
        CacheError: a worker sees another cache or another model.
    """
    begun, done = time.monotonic(), Done()
    if len(schedule.chunks):
        sweep(encodings)
        root, tokenizer = encodings.folder.parent, request.tokenizer
        request = replace(
            request,
            model=str(Path(request.model).resolve()),
            tokenizer=None if tokenizer is None else str(Path(tokenizer).resolve()),
        )
        job = Job(
            ident=uuid.uuid4().hex,
            cache=str(root),
            store=open_store(root).id,
            name=encodings.name,
            spec=encodings.spec,
            request=request,
            batch_tokens=batch_tokens,
            abroad=address is not None,
        )
        packed = [pickle.dumps(chunk) for chunk in schedule.chunks]
        if address is None:
            room = sum(map(len, packed)) + _ROOM
            session = local_ray(max(cpu_count() or 1, workers or 1), room)
        else:
            session = attached_ray(address)
        with session:
            for outcome in _outcomes(job, packed, workers):
                if outcome.error is not None:
                    raise outcome.error
                done.add(outcome.done)
                if progress:
                    progress(outcome.texts, outcome.size)
    return Filled(schedule, done, time.monotonic() - begun)


def _outcomes(job: Job, packed: Sequence[bytes], workers: int | None) -> Iterator[_Outcome]:
    """Run all chunks; yields what became of them in the order in which they end."""
    import pyarrow
    import ray

    share = divide(job.request, workers, ray.nodes())
    if job.request.device != "cuda":  # ONNX Runtime would take all CPUs that the machine has
        job = replace(job, request=replace(job.request, threads=share.cpus))
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    context.execution_no_progress_timeout_s = -1  # a chunk takes as long as it takes
    tables = [pyarrow.table({_CHUNK: pyarrow.array([one], pyarrow.binary())}) for one in packed]
    results = ray.data.from_arrow(tables).map_batches(
        ChunkFiller,
        fn_constructor_args=(job,),
        batch_size=1,
        batch_format="pyarrow",
        compute=ray.data.ActorPoolStrategy(size=share.workers, max_tasks_in_flight_per_actor=1),
        num_cpus=share.cpus,
        num_gpus=share.gpus,
    )
    try:
        for row in results.iter_rows():
            yield pickle.loads(row[_OUTCOME])
    except ray.exceptions.RayError as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        why = lines[-1] if lines else "it does not say why"
        raise MissingError(
            f"Ray gave up: {type(error).__name__}: {why}",
            hint="What was committed is safe; the same command resumes there.",
        ) from error


def divide(request: EncoderRequest, workers: int | None, nodes: Sequence[dict[str, Any]]) -> Share:
    """Divide what a cluster has among workers: see `fill_with_ray`, and `ray.nodes`."""
    resources = [node["Resources"] for node in nodes if node["Alive"]]
    cpus = [int(one["CPU"]) for one in resources if one.get("CPU", 0) >= 1]
    if request.device == "cuda":
        gpus = int(sum(one.get("GPU", 0) for one in resources))
        if not gpus:
            raise MissingError(
                "--device cuda: Ray has no GPU", hint="`ray status` says what a cluster has."
            )
        _require_fit(workers, gpus, "GPU")
        return Share(workers or gpus, cpus=1, gpus=1)
    _require_fit(workers, sum(cpus), "CPU")
    count = workers or len(cpus)
    on_each = -(-count // len(cpus))
    most = max(1, min(cpus) // on_each)  # Ray lets a worker use as many threads
    return Share(count, cpus=min(request.threads or most, most), gpus=0)


def _require_fit(workers: int | None, most: int, what: str) -> None:
    if (workers or 1) > most:
        raise UsageError(f"--workers {workers or 1}: expected at most {most}, one for each {what}")


class ChunkFiller:
    """Takes on chunks, one at a call; Ray makes one in each worker process."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._opened: tuple[Encodings, Encoder] | None = None

    def __call__(self, batch: Any) -> Any:
        """Fill one chunk: an Arrow table with one row."""
        import pyarrow

        chunk = pickle.loads(batch[_CHUNK][0].as_py())
        try:
            _require_harmless(self._job, chunk)
            if self._opened is None:
                self._opened = open_here(self._job)
            outcome = _fill(self._job, *self._opened, chunk)
        except EnginecastError as error:
            if self._job.abroad:
                error.message = f"on {socket.gethostname()}: {error.message}"
            outcome = _Outcome(Done(), error=error)
        except Exception:  # a defect, whose trace Ray would hide
            trace = traceback.format_exc()
            outcome = _Outcome(Done(), error=RuntimeError(f"a worker failed:\n{trace}"))
        return pyarrow.table({_OUTCOME: pyarrow.array([pickle.dumps(outcome)], pyarrow.binary())})


def open_here(job: Job) -> tuple[Encodings, Encoder]:
    """Open the cache and the encoder; a CacheError where they are not the driver's."""
    store = open_store(job.cache)
    if store.id != job.store:
        raise CacheError(
            f"{job.cache}: expected the cache {job.store}, got {store.id}, another folder",
            hint="All workers need the cache at the same path, on a disk that they share.",
        )
    encodings = store.encodings(job.name)
    encoder = open_encoder(job.request)
    for found, what in ((encodings.spec, job.cache), (encoder.spec, job.request.model)):
        if found != job.spec:
            encoder.close()
            raise CacheError(
                f"{what}: another encoder than where the fill was started; there and here:"
                f" {'; '.join(differences(job.spec, found))}",
                hint="All workers need the same model at the same path.",
            )
    return encodings, encoder


def _fill(job: Job, encodings: Encodings, encoder: Encoder, chunk: Chunk) -> _Outcome:
    """Fill a chunk once no other fill is at it."""
    texts = size = 0

    def count(more: int, more_bytes: int) -> None:
        nonlocal texts, size
        texts, size = texts + more, size + more_bytes

    while True:
        with claim(encodings, chunk.name) as ours:
            if ours:
                done = fill_chunk(
                    encodings, encoder, chunk, batch_tokens=job.batch_tokens, progress=count
                )
                return _Outcome(done, texts, size)
        time.sleep(_PATIENCE)


def _require_harmless(job: Job, chunk: Chunk) -> None:
    """Refuse a chunk that several workers died over; Ray itself would try for ever."""
    from ray.experimental import internal_kv

    key = f"enginecast/{job.ident}/{chunk.name}".encode()
    # Those that began with it before; they must have died, since none gives up.
    deaths = int(internal_kv._internal_kv_get(key) or 0)
    internal_kv._internal_kv_put(key, str(deaths + 1).encode(), overwrite=True)
    if deaths >= _MOST_DEATHS:
        longest = max(len(one.ids) for one in chunk.wanted)
        raise MissingError(
            f"{deaths} workers died over the same {len(chunk.wanted)} texts of up to {longest}"
            " tokens; too little memory is the usual cause",
            hint="Give a smaller --batch-tokens, or fewer --workers.  What was committed is safe.",
        )


_LEAST_STORE = 80 << 20
"""Bytes: the smallest object store that Ray takes is 75 MB."""

_SHORT = 40
"""Letters of a temporary folder; Ray makes sockets below it, whose paths have at most 107."""

_ANSWER_SECONDS = 10.0
_RUNS = "`ray status` on a machine of the cluster says whether it runs."

_QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_BACKEND_LOG_LEVEL": "fatal",  # of this process's C++ part, which logs to standard error
    "RAY_DISABLE_FAILURE_SIGNAL_HANDLER": "1",  # else SIGTERM aborts, with a dump of the stack
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",  # else `uv run` makes it upload the working folder
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # else each worker without a GPU warns of a change
}


_TOKEN = secrets.token_hex(32)
"""One for all sessions of this process: Ray reads it once."""


@contextmanager
def local_ray(cpus: int, store_bytes: int) -> Iterator[None]:
    """Start Ray on this machine; end all of it, however the block or this process ends.

    It tells nobody that it is used, prints nothing, writes nothing outside a folder that goes with
    it, asks whoever connects for a token, and leaves no process behind; see `ray_reaper`.  `cpus`
    is what it may give to workers, `store_bytes` the size of the object store, about.
    """
    name = uuid.uuid4().hex
    variables = {
        **_QUIET,
        "RAY_AUTH_MODE": "token",  # Ray listens on all interfaces
        "RAY_AUTH_TOKEN": _TOKEN,
        "SPT_NOENV": "1",  # renamed processes keep their environment, by which they are found
        ray_reaper.SESSION: name,
    }
    with _quiet_ray(variables) as ray, _reaped(name) as folder:
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
    """Connect to a cluster; disconnect in the end, and leave it as it is."""
    if address.startswith("ray://"):
        raise UsageError(
            f"--ray-address {address}: Ray's client cannot run this",
            hint="Start the fill on a machine of the cluster, with --ray-address auto.",
        )
    host, _, port = address.rpartition(":")
    if host and port.isdigit():  # Ray itself tries for five minutes
        try:
            socket.create_connection((host, int(port)), _ANSWER_SECONDS).close()
        except (OSError, OverflowError) as error:
            what = f"--ray-address {address}: nobody answers: {error}"
            raise UsageError(what, hint=_RUNS) from error
    with _quiet_ray(_QUIET) as ray:
        try:
            with _no_standard_error():
                ray.init(address, log_to_driver=False, configure_logging=False)
        except (ConnectionError, RuntimeError, ValueError) as error:
            what = f"--ray-address {address}: {str(error).strip()}"
            raise UsageError(what, hint=_RUNS) from error
        try:
            _end_on_sigterm()
            yield
        finally:
            ray.shutdown()


@contextmanager
def _quiet_ray(variables: Mapping[str, str]) -> Iterator[Any]:
    """Import Ray and let it print nothing, neither notices of dead workers nor progress.

    Environment, loggers and the handler of SIGTERM are afterwards what they were.
    """
    environment = {name: os.environ.get(name) for name in variables}
    handler = signal.getsignal(signal.SIGTERM)
    levels: dict[logging.Logger, int] = {}
    os.environ.update(variables)
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
            warnings.filterwarnings("ignore", module=r"ray(\.|$)")
            with required("ray", "--engine ray", "ray"):
                import ray
                import ray.data
            for name in ("ray", "ray.data"):  # which its import configures
                logger = logging.getLogger(name)
                levels[logger] = logger.level
                logger.setLevel(logging.CRITICAL)
            yield ray
    finally:
        signal.signal(signal.SIGTERM, handler)
        for logger, level in levels.items():
            logger.setLevel(level)
        for name, value in environment.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def _reaped(name: str) -> Iterator[Path]:
    """A folder for a session, whose processes and folder end with the block or this process."""
    import psutil  # which Ray brings

    short = tempfile.gettempdir()
    base = short if len(short) <= _SHORT else "/tmp"
    folder = tempfile.mkdtemp(prefix="enginecast-ray-", dir=base)
    own = {key: value for key, value in os.environ.items() if key != ray_reaper.SESSION}
    with subprocess.Popen(
        [sys.executable, "-P", ray_reaper.__file__, name, folder],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**own, "PYTHONPATH": str(Path(psutil.__file__).parents[1])},
        start_new_session=True,  # Ctrl-C is for the driver
    ):
        yield Path(folder)  # then the pipe is closed and the process waited for


def _end_on_sigterm() -> None:
    """By an exception, so that Ray is ended; and with the shell's code, and not Ray's."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))


@contextmanager
def _no_standard_error() -> Iterator[None]:
    """Ray's C++ part says there that it was asked to say nothing."""
    sys.stderr.flush()
    before = os.dup(2)
    try:
        with open(os.devnull, "wb") as nothing:
            os.dup2(nothing.fileno(), 2)
        yield
    finally:
        os.dup2(before, 2)
        os.close(before)
