"""A fill in this process: chunk by chunk, beside others that fill the same cache."""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from enginecast.cache.claims import claim
from enginecast.cache.encoder import Encoder
from enginecast.cache.fill_chunk import Progress, fill_chunk
from enginecast.cache.leftovers import sweep
from enginecast.cache.plan import FillPlan
from enginecast.cache.store import Encodings
from enginecast.cache.work import Done, Failure

_PATIENCE = 0.2
"""Seconds between two looks at what other writers hold."""


@dataclass(frozen=True)
class Filled:
    """What a fill has done.

    Args:
        texts: given.
        unique: of these and the empty text, those with different token ids.
        cached: of the unique ones, those that were there before.
        stored: by this fill.
        failures: texts that were not stored.
        truncated: texts that were cut.
        bytes: of the shards that were written.
        tokens: of the texts stored.
        seconds: it took.
    """

    texts: int
    unique: int
    cached: int
    stored: int
    failures: tuple[Failure, ...]
    truncated: int
    bytes: int
    tokens: int
    seconds: float

    @property
    def by_others(self) -> int:
        """Texts that other writers stored meanwhile."""
        return self.unique - self.cached - self.stored - len(self.failures)

    @property
    def texts_per_second(self) -> float:
        return self.stored / self.seconds if self.seconds else 0.0

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


def fill_local(
    encodings: Encodings,
    encoder: Encoder,
    plan: FillPlan,
    *,
    batch_tokens: int,
    progress: Progress | None = None,
) -> Filled:
    """Encode what a plan lacks, and store it.

    A chunk that another live writer has is left for later.  An interrupt (KeyboardInterrupt) ends
    this in the batch that is being encoded; those before it are stored then.

    Args:
        batch_tokens, progress: see `fill_chunk`.

    Raises:
        InputError: the encoder refuses every text.
        MissingError: the disk is full.
    """
    begun = time.monotonic()
    sweep(encodings)
    done: list[Done] = []
    left, held = deque(range(len(plan.chunks))), 0
    while left:
        number = left.popleft()
        with claim(encodings, plan.chunks.name(number)) as ours:
            if ours:
                held = 0
                done.append(
                    fill_chunk(
                        encodings,
                        encoder,
                        plan.chunks[number],
                        batch_tokens=batch_tokens,
                        progress=progress,
                    )
                )
                continue
        left.append(number)
        held += 1
        if held >= len(left):
            time.sleep(_PATIENCE)
    return sum_up(plan, done, time.monotonic() - begun)


def sum_up(plan: FillPlan, done: Sequence[Done], seconds: float) -> Filled:
    """What became of all chunks of a plan."""
    return Filled(
        texts=plan.texts,
        unique=plan.unique,
        cached=plan.cached,
        stored=sum(one.texts for one in done),
        failures=tuple(failure for one in done for failure in one.failures),
        truncated=len(plan.cut),
        bytes=sum(one.bytes for one in done),
        tokens=sum(one.tokens for one in done),
        seconds=seconds,
    )
