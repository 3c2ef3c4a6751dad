"""What `enginecast cache fill` does.  Torch is imported only for a model that is run eagerly."""

import re
import time
import warnings
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.filesize import decimal
from rich.progress import BarColumn, FileSizeColumn, Progress, TextColumn, TimeRemainingColumn

from enginecast.cache.encoders.open_encoder import Encoder, open_encoder
from enginecast.cache.encoders.request import EncoderRequest, offer, part_of, resolve
from enginecast.cache.encoders.tokenizing import Tokenizing
from enginecast.cache.fill.local import Filled, batches, encode_batch, fill_local
from enginecast.cache.fill.local import Progress as Report
from enginecast.cache.fill.schedule import FillSchedule, schedule_fill
from enginecast.cache.fill.texts import read_texts
from enginecast.cache.store.disk import bytes_in
from enginecast.cache.store.folders import Encodings, create_store, find_store, require_name
from enginecast.cache.store.index import open_index
from enginecast.cache.store.records import record
from enginecast.cli.cache.options import FillFlags
from enginecast.cli.cache.upkeep_page import counted, say_lines
from enginecast.cli.terminal.output import print_json, progress, results, say
from enginecast.errors import EnginecastWarning, MissingError, UsageError
from enginecast.runtime.bundle.staging import require_space

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
_PROBE_TOKENS = 2048
"""Tokens, padding included, of each batch that an estimate runs."""


def run_fill(request: EncoderRequest, given: Path, cache: Path, options: FillFlags) -> int:
    """Fill a cache with the texts of a file; return the exit code.

    The encoder is called what `--name` says, else as its pipeline calls it, else "text_encoder".

    Returns:
        0: every text is there; 1: some gave no finite outputs, or were refused.

    Raises:
        EnginecastError: nothing was begun, or the disk failed; what was committed is safe.
    """
    too_long = options.too_long or ("truncate" if request.pipeline else "error")
    if too_long not in ("error", "truncate"):
        raise UsageError(f"--too-long {too_long}: expected error or truncate")
    if options.runner not in ("local", "ray"):
        raise UsageError(f"--runner {options.runner}: expected local or ray")
    for option, value in (("--workers", options.workers), ("--ray-address", options.ray_address)):
        if value is not None and options.runner != "ray":
            raise UsageError(f"{option} {value}: only for --runner ray")
    part = part_of(request.pipeline).part if request.pipeline else None
    name = options.name or part or NAME
    require_name(name)
    find_store(cache)  # or refuse it
    shard_bytes = _bytes("--shard-size", options.shard_size)
    most = None if options.max_disk is None else _bytes("--max-disk", options.max_disk)
    if request.pipeline is None and (line := offer(request.model, "fills")):
        say(progress(options.quiet), line)
    request = resolve(request)
    texts = read_texts(given, options.column)
    with closing(open_encoder(request)) as encoder:
        spec, about, tokenizer = encoder.spec, encoder.about, encoder.tokenizer
        store = find_store(cache)
        if store is not None and name in store.names():
            where = store.add(name, spec, about, tokenizer)
        else:  # nothing is written before it is known that it fits
            where = Encodings(cache.resolve() / name, spec, about)
        index = open_index(where, keep=False)
        if index.errors:
            warnings.warn(
                f"{where.folder}: {counted(len(index.errors), 'shard')} cannot be read, whose"
                f" texts count as missing: {index.errors[0].message}",
                EnginecastWarning,
                stacklevel=2,
            )
        schedule = schedule_fill(
            spec,
            Tokenizing(tokenizer, spec),
            texts,
            index,
            shard_bytes,
            too_long="truncate" if too_long == "truncate" else "error",
            least_chunks=_CHUNKS_EACH * options.workers if options.workers else 1,
        )
        beside = 0  # a new encoder brings its tokenizer along
        if schedule.to_do:
            beside = _RECORDS + _INDEXED * schedule.unique
            beside += 0 if where.folder.exists() else len(tokenizer)
            beside += sum(_RECORDED + len(one.text.encode()) for one in schedule.cut)
        disk = bytes_in([where.folder.parent]) + beside + (schedule.bytes if schedule.to_do else 0)
        _require_room(where, schedule, most, disk, beside)
        if options.dry_run:
            seconds = _estimate(encoder, schedule, options.batch_tokens)
            if options.as_json:
                print_json(estimate_json(where, schedule, disk, seconds))
            else:
                show_estimate(where, schedule, disk, seconds)
            return 0
        where = create_store(cache).add(name, spec, about, tokenizer)
        if schedule.cut:
            record(where, schedule.cut)
        filled = _fill(request, options, where, encoder, schedule)
    if options.as_json:
        print_json(filled_json(where, filled))
    elif not options.quiet:
        show_filled(where, filled)
    return 1 if filled.done.failures else 0


def _require_room(
    where: Encodings, schedule: FillSchedule, most: int | None, disk: int, beside: int
) -> None:
    """Refuse before work what the disk or `--max-disk` (`most`) does not hold.

    Args:
        disk: bytes of the cache afterwards, at most.
        beside: bytes of what a fill adds besides entries.
    """
    if not schedule.to_do:
        return
    root, added = where.folder.parent, schedule.bytes + beside
    require_space(root, added)
    if most is None or disk <= most:
        return
    now = disk - added
    fitting = max(0, int((most - now - beside) / schedule.bytes * schedule.to_do))
    less = "store less of each (--store-dtype bfloat16), " if schedule.bytes > beside else ""
    raise MissingError(
        f"{root}: expected at most {decimal(most)} (--max-disk), got {decimal(now)} that are"
        f" there, {decimal(schedule.bytes)} of {schedule.to_do:,} texts and {decimal(beside)} of"
        " the tokenizer and records",
        hint=f"About {fitting:,} of the texts would fit.  Give fewer, {less}or allow more"
        f" ({disk}B).",
    )


def _fill(
    request: EncoderRequest,
    options: FillFlags,
    where: Encodings,
    encoder: Encoder,
    schedule: FillSchedule,
) -> Filled:
    try:
        with watch(schedule, quiet=options.quiet) as report:
            if options.runner == "local":
                return fill_local(
                    where, encoder, schedule, batch_tokens=options.batch_tokens, progress=report
                )
            encoder.close()  # each worker opens its own
            from enginecast.cache.fill.ray import fill_with_ray

            return fill_with_ray(
                where,
                request,
                schedule,
                batch_tokens=options.batch_tokens,
                workers=options.workers,
                address=options.ray_address,
                progress=report,
            )
    except KeyboardInterrupt:
        say(progress(options.quiet), "What was encoded is stored; the same command goes on there.")
        raise


def _bytes(option: str, text: str) -> int:
    found = _SIZE.fullmatch(text.strip())
    size = int(float(found[1]) * _UNITS[(found[2] or "").lower()]) if found else 0
    if size < 1:
        raise UsageError(f"{option} {text}: expected a size such as 256MB, 1.5GB or 1GiB")
    return size


def _estimate(encoder: Encoder, schedule: FillSchedule, batch_tokens: int) -> float:
    """Seconds that the encoding will take about, from a batch out of each third of the texts."""
    if not schedule.to_do:
        return 0.0
    encode_batch(encoder, schedule.chunks.sample(0, 1))  # the first run sets things up
    seconds, most = 0.0, min(batch_tokens, _PROBE_TOKENS)
    thirds = [schedule.to_do * number // 3 for number in range(4)]
    for begin, end in pairwise(thirds):
        left = schedule.chunks.sample((begin + end) // 2, max(1, min(most, end - begin)))
        batch = next(batches(left, encoder.spec, most))
        begun = time.perf_counter()
        encode_batch(encoder, batch)
        seconds += (time.perf_counter() - begun) / len(batch) * (end - begin)
    return seconds


_FAILURES = 5
"""Failures that are named; failed.jsonl has all."""


@contextmanager
def watch(schedule: FillSchedule, *, quiet: bool) -> Iterator[Report | None]:
    """Show how far a fill is, on a terminal; yields what to call for each batch.

    The bar counts bytes, which take equally long, and not texts: the longest come first.
    """
    console = progress(quiet)
    if quiet or not console.is_terminal or not schedule.to_do:
        yield None
        return
    columns = (
        BarColumn(),
        TextColumn("{task.fields[texts]:,} of {task.fields[all]:,} texts"),
        TextColumn("{task.fields[rate]:,.0f} texts/s"),
        FileSizeColumn(),
        TimeRemainingColumn(elapsed_when_finished=True),
    )
    with Progress(*columns, console=console, transient=True) as shown:
        total = max(1, schedule.output_bytes)
        task = shown.add_task("", total=total, texts=0, all=schedule.to_do, rate=0)
        done = 0

        def report(texts: int, size: int) -> None:
            nonlocal done
            done += texts
            rate = done / (shown.tasks[0].elapsed or float("inf"))
            shown.update(task, advance=size, texts=done, rate=rate)

        yield report


def show_filled(where: Encodings, filled: Filled) -> None:
    """What a fill has done, and how to read it."""
    console, cache = results(), str(where.folder.parent)
    say(console, f"{cache}: {where.name}")
    schedule, done = filled.schedule, filled.done
    lines = [("texts", f"{schedule.texts:,}; {schedule.unique:,} unique with the empty text")]
    if schedule.to_do:
        lines += [
            ("already there", f"{schedule.cached:,}"),
            ("stored", f"{done.texts:,}, {decimal(done.bytes)}"),
        ]
        if filled.by_others:
            lines.append(("by others", f"{filled.by_others:,}, meanwhile"))
        if done.failures:
            lines.append(("not stored", f"{len(done.failures):,}"))
        if schedule.cut:
            most = where.spec.max_length
            cut = f"{len(schedule.cut):,} of more than {most:,} tokens; truncated.jsonl lists them"
            lines.append(("cut", cut))
        texts, tokens = _rates(filled)
        rates = f"{texts:,.0f} texts/s, {tokens:,.0f} tokens/s"
        lines.append(("time", f"{filled.seconds:.1f} s: {rates}"))
    else:
        lines.append(("already there", "all of them"))
    say_lines(console, lines)
    failures = done.failures
    if failures:
        say(console, f"not stored, and listed in {where.folder / 'failed.jsonl'}:")
    for failure in failures[:_FAILURES]:
        say(console, f"  {failure.text!r}: {failure.reason}")
    if len(failures) > _FAILURES:
        say(console, f"  and {len(failures) - _FAILURES:,} more")
    say(console, f"read it: enginecast.cache.open_cache({cache!r}, {where.name!r}).by_text(TEXT)")


def _rates(filled: Filled) -> tuple[float, float]:
    """Texts and tokens a second."""
    seconds = filled.seconds or float("inf")
    return filled.done.texts / seconds, filled.done.tokens / seconds


def _counts(where: Encodings, schedule: FillSchedule) -> dict[str, Any]:
    return {
        "cache": str(where.folder.parent),
        "name": where.name,
        "texts": schedule.texts,
        "unique": schedule.unique,
        "cached_before": schedule.cached,
        "truncated": len(schedule.cut),
    }


def filled_json(where: Encodings, filled: Filled) -> dict[str, Any]:
    """The same for `--json`."""
    texts, tokens = _rates(filled)
    return {
        **_counts(where, filled.schedule),
        "stored": filled.done.texts,
        "stored_by_others": filled.by_others,
        "failed": [
            {"text": one.text, "tokens": one.tokens, "reason": one.reason}
            for one in filled.done.failures
        ],
        "bytes": filled.done.bytes,
        "seconds": round(filled.seconds, 3),
        "texts_per_second": round(texts, 1),
        "tokens_per_second": round(tokens, 1),
    }


def show_estimate(where: Encodings, schedule: FillSchedule, disk: int, seconds: float) -> None:
    """What a fill would take."""
    console = results()
    say(console, f"{where.folder.parent}: {where.name}; nothing was written")
    lengths = f"{schedule.shortest} to {schedule.longest}"
    shards = counted(len(schedule.chunks), "shard")
    duration = f"{seconds:.2g} s" if seconds < 60 else str(timedelta(seconds=round(seconds)))
    lines = {
        "texts": f"{schedule.texts:,}; {schedule.unique:,} unique with the empty text",
        "already there": f"{schedule.cached:,}",
        "to encode": f"{schedule.to_do:,} with {schedule.tokens:,} tokens",
        "tokens a text": f"{lengths}, half of them up to {schedule.median:g}",
        "cut": f"{len(schedule.cut):,} of more than {where.spec.max_length:,} tokens"
        if schedule.cut
        else "none is too long",
        "entries": f"{schedule.bytes:,} bytes ({decimal(schedule.bytes)}) in {shards}",
        "disk": f"up to {disk:,} bytes ({decimal(disk)}): --max-disk {disk}B",
        "time": f"about {duration} on this machine",
    }
    say_lines(console, lines.items())


def estimate_json(
    where: Encodings, schedule: FillSchedule, disk: int, seconds: float
) -> dict[str, Any]:
    """The same for `--json`."""
    return {
        **_counts(where, schedule),
        "dry_run": True,
        "to_encode": schedule.to_do,
        "tokens": schedule.tokens,
        "tokens_per_text": {
            "least": schedule.shortest,
            "median": schedule.median,
            "most": schedule.longest,
        },
        "bytes": schedule.bytes,
        "disk_bytes": disk,  # of the whole cache afterwards, at most: what --max-disk has to allow
        "shards": len(schedule.chunks),
        "seconds": round(seconds, 3),
    }
