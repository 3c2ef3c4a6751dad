"""What `enginecast cache fill` does.  Torch is imported only for a model that is run eagerly."""

import os
import re
import time
import warnings
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

from rich.filesize import decimal

from enginecast.cache.batches import encode_batch
from enginecast.cache.encoder import Encoder
from enginecast.cache.encoders import open_encoder
from enginecast.cache.fill import Filled, fill_local
from enginecast.cache.index import Index, open_index
from enginecast.cache.pipelines import part_of, resolve
from enginecast.cache.plan import FillPlan, plan_fill
from enginecast.cache.records import record_truncated
from enginecast.cache.request import EncoderRequest, TooLong
from enginecast.cache.store import Encodings, create_store, find_store, require_name
from enginecast.cache.texts import read_texts
from enginecast.cache.tokenizing import Tokenizing
from enginecast.commands_engine import print_json
from enginecast.errors import MissingError, UsageError
from enginecast.fill_page import estimate_json, filled_json, show_estimate, show_filled, watch
from enginecast.runtime.load import EnginecastWarning
from enginecast.runtime.staging import require_space
from enginecast.terminal import progress, results_apart, say

NAME = "text_encoder"
"""What a cache calls an encoder of which nobody says anything."""
_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?([kMGT]i?)?B", re.IGNORECASE)
_UNITS = {"": 1, **{unit: 1000**power for power, unit in enumerate("kmgt", 1)}}
_UNITS |= {f"{unit}i": 1024**power for power, unit in enumerate("kmgt", 1)}
_CHUNKS_EACH = 4
"""Chunks for each of several workers at least, so that none is idle for long."""
_RECORDS = 16_384
"""Bytes that spec, config and marks take beside the shards, about."""
_INDEXED = 24
"""Bytes of a text in the index."""
_RECORDED = 120
"""Bytes that the record of a text that was cut takes besides the text."""
_TRIAL_TOKENS = 2048
"""Tokens, padding included, of each batch that an estimate runs."""


@dataclass(frozen=True)
class FillOptions:
    """The options of `cache fill` that do not concern the encoder, as they were given.

    Args:
        texts: file or folder to read.
        column: of the texts; None: the only one of caption, text, prompt.
        cache: folder; made when it is not there.
        name: of the encoder in the cache; None: see `run_fill`.
        too_long: "error" or "truncate".
        batch_tokens: tokens in a batch, padding included.
        shard_size: "256MB".
        max_disk: size that the cache may have in the end; None: any.
        dry_run: estimate, and write nothing.
        engine: "local" or "ray".
        workers: encoders at work at once, for ray; None: as many as fit.
        ray_address: of a running cluster; None: a local one.
        as_json: print one JSON object.
        quiet: no progress, no tables.
    """

    texts: Path
    cache: Path
    column: str | None = None
    name: str | None = None
    too_long: str = "error"
    batch_tokens: int = 16384
    shard_size: str = "256MB"
    max_disk: str | None = None
    dry_run: bool = False
    engine: str = "local"
    workers: int | None = None
    ray_address: str | None = None
    as_json: bool = False
    quiet: bool = False


@dataclass(frozen=True)
class _Checked:
    """Options that were looked at."""

    name: str
    too_long: TooLong
    shard_bytes: int
    max_disk: int | None


@results_apart()
def run_fill(request: EncoderRequest, options: FillOptions) -> int:
    """Fill a cache; return the exit code.

    The encoder is called what `--name` says, else as its pipeline calls it, else "text_encoder".

    Returns:
        0: every text is there; 1: some gave no finite outputs, or were refused.

    Raises:
        EnginecastError: nothing was begun, or the disk failed; what was committed is safe.
    """
    checked = _check(request, options)
    request = resolve(request)
    texts = read_texts(options.texts, options.column)
    with closing(open_encoder(request)) as encoder:
        where = _find(options.cache, checked.name, encoder)
        plan = plan_fill(
            where,
            Tokenizing(encoder.tokenizer, encoder.spec),
            texts,
            _index(where),
            checked.shard_bytes,
            too_long=checked.too_long,
            least_chunks=_CHUNKS_EACH * options.workers if options.workers else 1,
        )
        _require_room(where, plan, checked.max_disk, len(encoder.tokenizer))
        if options.dry_run:
            seconds = _estimate(encoder, plan, options.batch_tokens)
            if options.as_json:
                print_json(estimate_json(where, plan, seconds))
            else:
                show_estimate(where, plan, seconds)
            return 0
        store = create_store(options.cache)
        where = store.add(checked.name, encoder.spec, encoder.about, encoder.tokenizer)
        if plan.cut:
            record_truncated(where, plan.cut)
        filled = _fill(request, options, where, encoder, plan)
    if options.as_json:
        print_json(filled_json(where, filled))
    elif not options.quiet:
        show_filled(where, filled)
    return 1 if filled.failures else 0


def _fill(
    request: EncoderRequest,
    options: FillOptions,
    where: Encodings,
    encoder: Encoder,
    plan: FillPlan,
) -> Filled:
    try:
        with watch(plan, quiet=options.quiet) as told:
            if options.engine == "local":
                return fill_local(
                    where, encoder, plan, batch_tokens=options.batch_tokens, progress=told
                )
            encoder.close()  # each worker opens its own
            from enginecast.cache.fill_ray import fill_with_ray

            return fill_with_ray(
                where,
                request,
                plan,
                batch_tokens=options.batch_tokens,
                workers=options.workers,
                address=options.ray_address,
                progress=told,
            )
    except KeyboardInterrupt:
        say(progress(options.quiet), "What was encoded is stored; the same command goes on there.")
        raise


def _check(request: EncoderRequest, options: FillOptions) -> _Checked:
    if options.too_long not in ("error", "truncate"):
        raise UsageError(f"--too-long {options.too_long}: expected error or truncate")
    if options.engine not in ("local", "ray"):
        raise UsageError(f"--engine {options.engine}: expected local or ray")
    for option, value in (("--workers", options.workers), ("--ray-address", options.ray_address)):
        if value is not None and options.engine != "ray":
            raise UsageError(f"{option} {value}: only for --engine ray")
    part = part_of(request.pipeline).part if request.pipeline else None
    name = options.name or part or NAME
    require_name(name)
    find_store(options.cache)  # or refuse it
    return _Checked(
        name,
        "truncate" if options.too_long == "truncate" else "error",
        _bytes("--shard-size", options.shard_size),
        None if options.max_disk is None else _bytes("--max-disk", options.max_disk),
    )


def _bytes(option: str, text: str) -> int:
    found = _SIZE.fullmatch(text.strip())
    size = int(float(found[1]) * _UNITS[(found[2] or "").lower()]) if found else 0
    if size < 1:
        raise UsageError(f"{option} {text}: expected a size such as 256MB, 1.5GB or 1GiB")
    return size


def _find(cache: Path, name: str, encoder: Encoder) -> Encodings:
    """Where the entries are or will be; writes nothing."""
    store = find_store(cache)
    if store is not None and name in store.names():
        return store.add(name, encoder.spec, encoder.about, encoder.tokenizer)
    return Encodings(cache.resolve() / name, encoder.spec, encoder.about)


def _index(where: Encodings) -> Index:
    """What is there.  Writes nothing, and warns of what is damaged."""
    index = open_index(where, keep=False)
    if index.errors:
        shards = "1 shard" if len(index.errors) == 1 else f"{len(index.errors)} shards"
        warnings.warn(
            f"{where.folder}: {shards} cannot be read, whose texts count as missing: "
            f"{index.errors[0].message}",
            EnginecastWarning,
            stacklevel=2,
        )
    return index


def _require_room(where: Encodings, plan: FillPlan, most: int | None, tokenizer: int) -> None:
    """Refuse before work what the disk or `--max-disk` does not hold.

    Args:
        most: bytes that the cache may have in the end; None: any number.
        tokenizer: bytes of the tokenizer, which a new encoder brings along.
    """
    if not plan.to_do:
        return
    root = where.folder.parent
    beside = _RECORDS + _INDEXED * plan.unique + (0 if where.folder.exists() else tokenizer)
    beside += sum(_RECORDED + len(one.text.encode()) for one in plan.cut)
    added = plan.bytes + beside
    require_space(root, added)
    if most is None:
        return
    now = _bytes_in(root)
    if now + added <= most:
        return
    fitting = max(0, int((most - now - beside) / plan.bytes * plan.to_do))
    raise MissingError(
        f"{root}: expected at most {decimal(most)} (--max-disk), got {decimal(now)} that are"
        f" there and {decimal(added)} that {plan.to_do:,} texts add",
        hint=f"About {fitting:,} of the texts would fit.  Give fewer, allow more, or store less of"
        " each (--store-dtype bfloat16).",
    )


def _bytes_in(root: Path) -> int:
    """Of all files by now; other writers make and remove some meanwhile."""
    found = 0
    for folder, _, names in os.walk(root):
        for name in names:
            with suppress(FileNotFoundError):
                found += os.stat(os.path.join(folder, name)).st_size
    return found


def _estimate(encoder: Encoder, plan: FillPlan, batch_tokens: int) -> float:
    """Seconds that the encoding will take about, from a batch out of each third of the texts."""
    if not plan.to_do:
        return 0.0
    encode_batch(encoder, plan.chunks.sample(0, 1))  # the first run sets things up
    return sum(_third(encoder, plan, number, batch_tokens) for number in range(3))


def _third(encoder: Encoder, plan: FillPlan, number: int, batch_tokens: int) -> float:
    begin, end = plan.to_do * number // 3, plan.to_do * (number + 1) // 3
    if begin == end:
        return 0.0
    first = (begin + end) // 2
    longest = plan.chunks.sample(first, 1)[0]
    length = encoder.spec.max_length if encoder.spec.padded else max(1, len(longest.ids))
    count = min(batch_tokens, _TRIAL_TOKENS) // length
    batch = plan.chunks.sample(first, max(1, min(count, end - first)))
    begun = time.perf_counter()
    encode_batch(encoder, batch)
    return (time.perf_counter() - begun) / len(batch) * (end - begin)
