"""What a worker of Ray does: opens the encoder once, then fills chunk after chunk.

What it hands back is small: names of shards, counts, failures.  Errors are handed back too, and not
raised: Ray would wrap them in tracebacks of its own.
"""

import pickle
import socket
import time
import traceback
from dataclasses import dataclass
from typing import Any

from enginecast.cache.claims import claim
from enginecast.cache.encoder import Encoder
from enginecast.cache.encoders import open_encoder
from enginecast.cache.fill_chunk import fill_chunk
from enginecast.cache.request import EncoderRequest
from enginecast.cache.spec import EncoderSpec, differences
from enginecast.cache.store import Encodings, open_store
from enginecast.cache.work import Chunk, Done
from enginecast.errors import CacheError, EnginecastError, MissingError

CHUNK, OUTCOME = "chunk", "outcome"
"""Columns of what goes in, and of what comes out: pickles."""

_MOST_DEATHS = 3
"""Workers that may die over a chunk, before it is taken to be what kills them."""

_PATIENCE = 0.5
"""Seconds between two tries to get a chunk that another fill is at."""


@dataclass(frozen=True)
class Job:
    """A fill, as every worker is told.

    Args:
        ident: tells it from other fills on the same cluster.
        cache: path of the cache, and `store` what the driver found to be its id.
        name: of the encoder in the cache.
        spec: of the encoder that the driver opened.
        request: to open it again, with absolute paths.
        batch_tokens: see `fill_chunk`.
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
class Outcome:
    """What became of a chunk.

    Args:
        done: None where it failed.
        texts: that it had, and `size` the bytes of their outputs.
        error: to be raised by the driver.
        trace: of an exception that is a defect.
    """

    done: Done | None = None
    texts: int = 0
    size: int = 0
    error: EnginecastError | None = None
    trace: str = ""


class ChunkFiller:
    """Takes on chunks, one at a call; Ray makes one in each worker process."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._opened: tuple[Encodings, Encoder] | None = None

    def __call__(self, batch: Any) -> Any:
        """Fill one chunk.

        Args:
            batch: an Arrow table with one row.
        """
        import pyarrow

        outcome = self._outcome(pickle.loads(batch[CHUNK][0].as_py()))
        return pyarrow.table({OUTCOME: pyarrow.array([pickle.dumps(outcome)], pyarrow.binary())})

    def _outcome(self, chunk: Chunk) -> Outcome:
        try:
            _require_harmless(chunk, _deaths(self._job, chunk))
            if self._opened is None:
                self._opened = open_here(self._job)
            return fill(self._job, *self._opened, chunk)
        except EnginecastError as error:
            return Outcome(error=_placed(self._job, error))
        except Exception:  # a defect: the driver raises it with this trace, Ray would hide it
            return Outcome(trace=traceback.format_exc())


def open_here(job: Job) -> tuple[Encodings, Encoder]:
    """Open the cache and the encoder, and see that they are the driver's.

    Raises:
        CacheError: they are others.
        EnginecastError: they cannot be opened.
    """
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


def fill(job: Job, encodings: Encodings, encoder: Encoder, chunk: Chunk) -> Outcome:
    """Fill a chunk once no other fill is at it.

    Raises:
        EnginecastError: see `fill_chunk`.
    """
    texts = size = 0

    def told(more: int, bytes_: int) -> None:
        nonlocal texts, size
        texts, size = texts + more, size + bytes_

    while True:
        with claim(encodings, chunk.name) as ours:
            if ours:
                done = fill_chunk(
                    encodings,
                    encoder,
                    chunk,
                    batch_tokens=job.batch_tokens,
                    progress=told,
                )
                return Outcome(done, texts, size)
        time.sleep(_PATIENCE)


def _deaths(job: Job, chunk: Chunk) -> int:
    """Workers that began with a chunk before; they must have died, since none gives up."""
    from ray.experimental import internal_kv

    key = f"enginecast/{job.ident}/{chunk.name}".encode()
    before = int(internal_kv._internal_kv_get(key) or 0)
    internal_kv._internal_kv_put(key, str(before + 1).encode(), overwrite=True)
    return before


def _require_harmless(chunk: Chunk, deaths: int) -> None:
    """Ray itself would try for ever."""
    if deaths >= _MOST_DEATHS:
        longest = max(len(one.ids) for one in chunk.wanted)
        raise MissingError(
            f"{deaths} workers died over the same {len(chunk.wanted)} texts of up to {longest}"
            " tokens; too little memory is the usual cause",
            hint="Give a smaller --batch-tokens, or fewer --workers.  What was committed is safe.",
        )


def _placed(job: Job, error: EnginecastError) -> EnginecastError:
    """The error with the machine that it happened on, where there are several."""
    if job.abroad:
        error.message = f"on {socket.gethostname()}: {error.message}"
    return error
