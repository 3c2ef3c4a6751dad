"""A fill in this process: chunk by chunk, each encoded in batches and committed as one shard."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from enginecast.cache.encoders.open_encoder import Encoder
from enginecast.cache.fill.schedule import Chunk, FillSchedule, Wanted
from enginecast.cache.store.claims import claim, sweep
from enginecast.cache.store.folders import Encodings
from enginecast.cache.store.index import open_index
from enginecast.cache.store.records import Failure, record
from enginecast.cache.store.shard import Entry, shard_size
from enginecast.cache.store.spec import EncoderSpec, pad_rows
from enginecast.errors import InputError
from enginecast.runtime.values.arrays import Array

_PATIENCE = 0.2
"""Seconds between two looks at what other writers hold."""
Progress = Callable[[int, int], None]
"""Called with the texts that were done since the last call, and the bytes of their outputs."""

FLUSH_SECONDS = 60.0
"""The most work that a killed fill loses."""


@dataclass
class Done:
    """What became of chunks.

    Args:
        shards: names of the files that were committed; more than one where a chunk took long.
        texts, tokens: that were stored; those that were there already are not counted.
        bytes: of the shards.
    """

    shards: list[str] = field(default_factory=list)
    texts: int = 0
    tokens: int = 0
    bytes: int = 0
    failures: list[Failure] = field(default_factory=list)

    def add(self, more: "Done") -> None:
        self.shards += more.shards
        self.texts += more.texts
        self.tokens += more.tokens
        self.bytes += more.bytes
        self.failures += more.failures


@dataclass(frozen=True)
class Filled:
    """What a fill has done, and the seconds that it took."""

    schedule: FillSchedule
    done: Done
    seconds: float

    @property
    def by_others(self) -> int:
        """Texts that other writers stored meanwhile."""
        return self.schedule.to_do - self.done.texts - len(self.done.failures)


def fill_local(
    encodings: Encodings,
    encoder: Encoder,
    schedule: FillSchedule,
    *,
    batch_tokens: int,
    progress: Progress | None = None,
) -> Filled:
    """Encode what the cache lacks, and store it; arguments are those of `fill_chunk`.

    A chunk that another live writer has is left for later.  An interrupt (KeyboardInterrupt) ends
    this in the batch that is being encoded; those before it are stored then.

    Raises:
        InputError: the encoder refuses every text.
        MissingError: the disk is full.
    """
    begun, done = time.monotonic(), Done()
    sweep(encodings)
    left, held = deque(range(len(schedule.chunks))), 0
    while left:
        number = left.popleft()
        with claim(encodings, schedule.chunks.name(number)) as ours:
            if ours:
                chunk, held = schedule.chunks[number], 0
                filled = fill_chunk(
                    encodings, encoder, chunk, batch_tokens=batch_tokens, progress=progress
                )
                done.add(filled)
                continue
        left.append(number)
        held += 1
        if held >= len(left):
            time.sleep(_PATIENCE)
    return Filled(schedule, done, time.monotonic() - begun)


def fill_chunk(
    encodings: Encodings,
    encoder: Encoder,
    chunk: Chunk,
    *,
    batch_tokens: int,
    flush_seconds: float = FLUSH_SECONDS,
    progress: Progress | None = None,
) -> Done:
    """Encode what the cache lacks of a chunk, and store it.

    The cache is looked at again, so a chunk that another process has done meanwhile costs nothing.
    Whatever ends this, an interrupt too: the texts encoded by then are committed, and those that
    failed are recorded.

    Args:
        batch_tokens: the most tokens that are encoded at once, padding included.
        flush_seconds: commit when this much time went by, before the chunk is through.
        progress: called after each batch; texts that were there already count, too.
    """

    def report(wanted: Sequence[Wanted]) -> None:
        if progress and wanted:
            spec = encodings.spec
            progress(len(wanted), sum(spec.bytes_for(len(one.ids)) for one in wanted))

    there = open_index(encodings).find_all([one.key for one in chunk.wanted]) >= 0
    report([one for one, found in zip(chunk.wanted, there, strict=True) if found])
    missing = [one for one, found in zip(chunk.wanted, there, strict=True) if not found]
    pending = _Pending(encodings)
    try:
        for batch in batches(missing, encodings.spec, batch_tokens):
            entries, failures = encode_batch(encoder, batch)
            pending.entries += entries
            pending.done.failures += failures
            if time.monotonic() - pending.since >= flush_seconds:
                pending.commit()
            report(batch)
    finally:
        pending.commit()
    return pending.done


@dataclass
class _Pending:
    """What was encoded and is not committed yet, and what was done before."""

    encodings: Encodings
    entries: list[Entry] = field(default_factory=list)
    done: Done = field(default_factory=Done)
    since: float = field(default_factory=time.monotonic)

    def commit(self) -> None:
        done = self.done
        if self.entries:
            done.shards.append(self.encodings.commit(self.entries).name)
            sizes = [len(entry.ids) for entry in self.entries]
            text_bytes = sum(len(entry.text.encode()) for entry in self.entries)
            done.texts += len(sizes)
            done.tokens += sum(sizes)
            # Not asked of the disk: somebody may have joined it with others by now.
            done.bytes += shard_size(self.encodings.spec, sizes, text_bytes)
            self.entries = []
        record(self.encodings, done.failures)  # of which it leaves out those that it has
        self.since = time.monotonic()


def batches(
    wanted: Sequence[Wanted], spec: EncoderSpec, batch_tokens: int
) -> Iterator[Sequence[Wanted]]:
    """Cut texts, longest first, so that little is padding; a batch has one text at least."""
    begin = 0
    while begin < len(wanted):
        length = _padded_length(wanted[begin : begin + 1], spec)
        end = begin + max(1, batch_tokens // length)
        yield wanted[begin:end]
        begin = end


def encode_batch(encoder: Encoder, batch: Sequence[Wanted]) -> tuple[list[Entry], list[Failure]]:
    """Encode texts and look at every row that is kept; return what can be stored, and the rest.

    A text whose outputs are not finite, or that the encoder refuses when it is alone, is a failure;
    the others of its batch are not touched by that.  Where the encoder refuses each of several
    texts, it is not the texts' fault: its InputError is raised.
    """
    spec, entries, failures = encoder.spec, list[Entry](), list[Failure]()
    ids, mask = pad_batch(batch, spec)
    try:
        outputs = encoder.encode(ids, mask)
    except InputError as error:
        if len(batch) == 1:
            return [], [_failure(batch[0], f"refused by the encoder: {error.message}")]
        for stored, failed in (encode_batch(encoder, [one]) for one in batch):
            entries += stored
            failures += failed
        if not entries:
            raise
        return entries, failures
    for row, wanted in enumerate(batch):
        tokens = len(wanted.ids)
        begin, end = spec.span(tokens)
        left = spec.padding_side == "left" and not spec.padded
        shift = ids.shape[1] - tokens if left else 0
        rows = slice(begin + shift, max(begin, end) + shift)
        # Cloned: a view would keep the whole batch in memory.
        kept = {
            one.name: outputs[one.name][(row, rows) if one.per == "token" else row].copy()
            for one in spec.outputs
        }
        reasons = [
            f"{name}: {values.size - np.isfinite(values).sum()} of {values.size} values are not "
            f"finite in {values.dtype}"
            for name, values in kept.items()
            if not np.isfinite(values).all()
        ]
        if reasons:
            failures.append(_failure(wanted, reasons[0]))
        else:
            entries.append(Entry(wanted.key, wanted.text, wanted.ids, kept))
    return entries, failures


def pad_batch(batch: Sequence[Wanted], spec: EncoderSpec) -> tuple[Array, Array]:
    """Ids and mask of a batch: int64 [texts, length], the length that the spec says or the longest.

    The mask is 1 for tokens; all ones where the encoder gets no padding mask.
    """
    length = _padded_length(batch, spec)
    ids, mask = pad_rows(spec, [wanted.ids for wanted in batch], length)
    return ids, mask if spec.mask else np.ones_like(mask)


def _padded_length(batch: Sequence[Wanted], spec: EncoderSpec) -> int:
    if spec.padded:
        return spec.max_length
    return max(1, *(len(wanted.ids) for wanted in batch))


def _failure(wanted: Wanted, reason: str) -> Failure:
    return Failure(wanted.text, len(wanted.ids), reason, wanted.key)
