"""One chunk of a fill: encoded batch by batch, committed as one shard."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from enginecast.cache.batches import Encoded, batches, encode_batch
from enginecast.cache.encoder import Encoder
from enginecast.cache.index import open_index
from enginecast.cache.records import record_failures
from enginecast.cache.shard_size import shard_size
from enginecast.cache.shard_writing import Entry
from enginecast.cache.spec import EncoderSpec
from enginecast.cache.store import Encodings
from enginecast.cache.work import Chunk, Done, Failure, Wanted

Progress = Callable[[int, int], None]
"""Called with the texts that were done since the last call, and the bytes of their outputs."""

FLUSH_SECONDS = 60.0
"""The most work that a killed fill loses."""


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

    Raises:
        InputError: the encoder refuses every text.
        MissingError: the disk is full.
    """
    there = open_index(encodings).find_all([one.key for one in chunk.wanted]) >= 0
    lacking = [one for one, found in zip(chunk.wanted, there, strict=True) if not found]
    pending = _Pending(encodings, flush_seconds)
    tell = _teller(progress, encodings.spec)
    tell([one for one, found in zip(chunk.wanted, there, strict=True) if found])
    try:
        for batch in batches(lacking, encodings.spec, batch_tokens):
            pending.add(encode_batch(encoder, batch))
            tell(batch)
    finally:
        pending.commit()
    return Done(
        shards=tuple(pending.shards),
        texts=pending.texts,
        tokens=pending.tokens,
        bytes=pending.bytes,
        failures=tuple(pending.failures),
    )


def _teller(progress: Progress | None, spec: EncoderSpec) -> Callable[[Sequence[Wanted]], None]:
    def tell(wanted: Sequence[Wanted]) -> None:
        if progress and wanted:
            progress(len(wanted), sum(spec.bytes_for(len(one.ids)) for one in wanted))

    return tell


@dataclass
class _Pending:
    """What was encoded and is not committed yet, and what was done before."""

    encodings: Encodings
    flush_seconds: float
    entries: list[Entry] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    shards: list[str] = field(default_factory=list)
    texts: int = 0
    tokens: int = 0
    bytes: int = 0
    recorded: int = 0
    since: float = field(default_factory=time.monotonic)

    def add(self, encoded: Encoded) -> None:
        self.entries += encoded.entries
        self.failures += encoded.failures
        if time.monotonic() - self.since >= self.flush_seconds:
            self.commit()

    def commit(self) -> None:
        if self.entries:
            self.shards.append(self.encodings.commit(self.entries).name)
            sizes = [len(entry.ids) for entry in self.entries]
            text_bytes = sum(len(entry.text.encode()) for entry in self.entries)
            self.texts += len(sizes)
            self.tokens += sum(sizes)
            # Not asked of the disk: somebody may have joined it with others by now.
            self.bytes += shard_size(self.encodings.spec, sizes, text_bytes)
            self.entries = []
        record_failures(self.encodings, self.failures[self.recorded :])
        self.recorded = len(self.failures)
        self.since = time.monotonic()
