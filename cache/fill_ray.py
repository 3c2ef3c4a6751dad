"""A fill by several workers at once, on Ray Data: on this machine, or on a cluster.

A call of `map_batches` gets one chunk and commits it: what Ray does again when a worker dies is
a whole chunk, whose entries are looked for first, under names that follow from their keys.  So the
contents are as if each was done once.  The outputs go to the disk where they are made, and never
through Ray.
"""

import pickle
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from os import cpu_count
from pathlib import Path
from typing import Any

from enginecast.cache.fill import Filled, sum_up
from enginecast.cache.fill_chunk import Progress
from enginecast.cache.fill_ray_session import attached_ray, local_ray
from enginecast.cache.fill_ray_worker import CHUNK, OUTCOME, ChunkFiller, Job, Outcome
from enginecast.cache.leftovers import sweep
from enginecast.cache.plan import FillPlan
from enginecast.cache.request import EncoderRequest
from enginecast.cache.store import Encodings, open_store
from enginecast.cache.work import Done
from enginecast.errors import MissingError, UsageError

_ROOM = 64 << 20
"""Bytes of the object store beyond the texts, for what Ray puts there itself."""


def fill_with_ray(
    encodings: Encodings,
    request: EncoderRequest,
    plan: FillPlan,
    *,
    batch_tokens: int,
    workers: int | None = None,
    address: str | None = None,
    progress: Progress | None = None,
) -> Filled:
    """Encode what a plan lacks, and store it.

    Args:
        request: opens the encoder that the plan was made for.
        workers: encoders at work at once; None: one for each GPU, or for each machine where the
            request is for the CPU.
        address: of a running cluster; None: a Ray of its own on this machine.
        batch_tokens: see `fill_chunk`.
        progress: called after each chunk.

    Raises:
        MissingError: Ray, a GPU, memory or disk is lacking.
        UsageError: no cluster there; more workers than fit.
        CacheError: a worker sees another cache or another model.
        EnginecastError: what else a worker met.
    """
    begun = time.monotonic()
    done: list[Done] = []
    if plan.chunks:
        sweep(encodings)
        job = _job(encodings, request, batch_tokens, abroad=address is not None)
        packed = [pickle.dumps(chunk) for chunk in plan.chunks]
        with _session(address, workers, packed):
            for outcome in _outcomes(job, packed, workers):
                done.append(_accepted(outcome))
                if progress:
                    progress(outcome.texts, outcome.size)
    return sum_up(plan, done, time.monotonic() - begun)


def _job(
    encodings: Encodings,
    request: EncoderRequest,
    batch_tokens: int,
    *,
    abroad: bool,
) -> Job:
    root = encodings.folder.parent
    tokenizer = request.tokenizer
    return Job(
        ident=uuid.uuid4().hex,
        cache=str(root),
        store=open_store(root).id,
        name=encodings.name,
        spec=encodings.spec,
        request=replace(
            request,
            model=str(Path(request.model).resolve()),
            tokenizer=None if tokenizer is None else str(Path(tokenizer).resolve()),
        ),
        batch_tokens=batch_tokens,
        abroad=abroad,
    )


def _session(
    address: str | None, workers: int | None, packed: Sequence[bytes]
) -> AbstractContextManager[None]:
    if address is not None:
        return attached_ray(address)
    return local_ray(max(cpu_count() or 1, workers or 1), sum(map(len, packed)) + _ROOM)


def _outcomes(job: Job, packed: Sequence[bytes], workers: int | None) -> Iterator[Outcome]:
    """Run all chunks; yields what became of them in the order in which they end."""
    import pyarrow
    import ray

    share = divide(job.request, workers, ray.nodes())
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    context.execution_no_progress_timeout_s = -1  # a chunk takes as long as it takes
    tables = [pyarrow.table({CHUNK: pyarrow.array([one], pyarrow.binary())}) for one in packed]
    results = ray.data.from_arrow(tables).map_batches(
        ChunkFiller,
        fn_constructor_args=(_with_threads(job, share),),
        batch_size=1,
        batch_format="pyarrow",
        compute=ray.data.ActorPoolStrategy(size=share.workers, max_tasks_in_flight_per_actor=1),
        num_cpus=share.cpus,
        num_gpus=share.gpus,
    )
    try:
        for row in results.iter_rows():
            yield pickle.loads(row[OUTCOME])
    except ray.exceptions.RayError as error:
        raise _explained(error) from error


def _with_threads(job: Job, share: "Share") -> Job:
    """A worker keeps to its CPUs; ONNX Runtime would take all that the machine has."""
    if job.request.device == "cuda":
        return job
    return replace(job, request=replace(job.request, threads=share.cpus))


@dataclass(frozen=True)
class Share:
    """How many workers there are, and the CPUs and GPUs that each of them has."""

    workers: int
    cpus: int
    gpus: int


def divide(request: EncoderRequest, workers: int | None, nodes: Sequence[dict[str, Any]]) -> Share:
    """Divide what a cluster has among workers.

    Args:
        workers: None: one for each GPU, or for each machine where the request is for the CPU.
        nodes: as `ray.nodes` gives them.

    Raises:
        MissingError: no GPU.
        UsageError: more workers than fit.
    """
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


def _accepted(outcome: Outcome) -> Done:
    if outcome.error is not None:
        raise outcome.error
    if outcome.done is None:
        raise RuntimeError(f"a worker failed:\n{outcome.trace}")
    return outcome.done


def _explained(error: Exception) -> MissingError:
    """What Ray gave up over, in a line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return MissingError(
        f"Ray gave up: {type(error).__name__}: {lines[-1] if lines else 'it does not say why'}",
        hint="What was committed is safe; the same command goes on there.",
    )
