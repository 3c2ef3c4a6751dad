"""What `cache fill` shows: progress while it works, what was done, what it would take."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from rich.filesize import decimal
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

from enginecast.cache.fill import Filled
from enginecast.cache.fill_chunk import Progress as Told
from enginecast.cache.plan import FillPlan
from enginecast.cache.store import Encodings
from enginecast.terminal import progress, results, say

_SHOWN = 5
"""Failures that are named; failed.jsonl has all."""


@contextmanager
def watch(plan: FillPlan, *, quiet: bool) -> Iterator[Told | None]:
    """Show how far a fill is, on a terminal; yields what is to be told of each batch.

    The bar counts bytes, which take equally long, and not texts: the longest come first.
    """
    console = progress(quiet)
    if quiet or not console.is_terminal or not plan.to_do:
        yield None
        return
    columns = (
        BarColumn(),
        TextColumn("{task.fields[texts]:,} of {task.fields[all]:,} texts"),
        _Rate(),
        _Bytes(),
        TimeRemainingColumn(elapsed_when_finished=True),
    )
    with Progress(*columns, console=console, transient=True) as shown:
        task = shown.add_task("", total=max(1, plan.output_bytes), texts=0, all=plan.to_do)
        done = 0

        def told(texts: int, size: int) -> None:
            nonlocal done
            done += texts
            shown.update(task, advance=size, texts=done)

        yield told


class _Rate(ProgressColumn):
    def render(self, task: Task) -> Text:
        elapsed = task.elapsed or 0
        return Text(f"{task.fields['texts'] / elapsed:,.0f} texts/s" if elapsed else "")


class _Bytes(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(decimal(int(task.completed)))


def show_filled(where: Encodings, filled: Filled) -> None:
    """What a fill has done, and how to read it."""
    console = results()
    say(console, f"{where.folder.parent}: {where.name}")
    for name, value in _lines(filled):
        say(console, f"  {name:<14}{value}")
    if filled.failures:
        say(console, f"not stored, and listed in {where.folder / 'failed.jsonl'}:")
    for failure in filled.failures[:_SHOWN]:
        say(console, f"  {failure.text!r}: {failure.reason}")
    if len(filled.failures) > _SHOWN:
        say(console, f"  and {len(filled.failures) - _SHOWN:,} more")
    say(console, f"read it: {_how_to_read(where)}")


def _lines(filled: Filled) -> Iterator[tuple[str, str]]:
    yield "texts", f"{filled.texts:,}; {filled.unique:,} different ones with the empty text"
    if filled.cached == filled.unique:
        yield "there already", "all of them"
        return
    yield "there already", f"{filled.cached:,}"
    yield "stored", f"{filled.stored:,}, {decimal(filled.bytes)}"
    if filled.by_others:
        yield "by others", f"{filled.by_others:,}, meanwhile"
    if filled.failures:
        yield "not stored", f"{len(filled.failures):,}"
    if filled.truncated:
        yield "cut", f"{filled.truncated:,} that were too long; truncated.jsonl lists them"
    rates = f"{filled.texts_per_second:,.0f} texts/s, {filled.tokens_per_second:,.0f} tokens/s"
    yield "time", f"{filled.seconds:.1f} s: {rates}"


def filled_json(where: Encodings, filled: Filled) -> dict[str, Any]:
    """The same for `--json`."""
    failures = [
        {"text": one.text, "tokens": one.tokens, "reason": one.reason} for one in filled.failures
    ]
    return {
        "cache": str(where.folder.parent),
        "name": where.name,
        "texts": filled.texts,
        "unique": filled.unique,
        "cached_before": filled.cached,
        "stored": filled.stored,
        "stored_by_others": filled.by_others,
        "failed": failures,
        "truncated": filled.truncated,
        "bytes": filled.bytes,
        "seconds": round(filled.seconds, 3),
        "texts_per_second": round(filled.texts_per_second, 1),
        "tokens_per_second": round(filled.tokens_per_second, 1),
    }


def show_estimate(where: Encodings, plan: FillPlan, seconds: float) -> None:
    """What a fill would take."""
    console = results()
    say(console, f"{where.folder.parent}: {where.name}; nothing was written")
    lines = {
        "texts": f"{plan.texts:,}; {plan.unique:,} different ones with the empty text",
        "there already": f"{plan.cached:,}",
        "to encode": f"{plan.to_do:,} with {plan.tokens:,} tokens",
        "tokens a text": f"{plan.shortest} to {plan.longest}, half of them up to {plan.median:g}",
        "cut": f"{len(plan.cut):,} that are too long" if plan.cut else "none is too long",
        "disk": f"{plan.bytes:,} bytes ({decimal(plan.bytes)}) in {_shards(len(plan.chunks))}",
        "time": f"about {_duration(seconds)} on this machine",
    }
    for name, value in lines.items():
        say(console, f"  {name:<14}{value}")


def estimate_json(where: Encodings, plan: FillPlan, seconds: float) -> dict[str, Any]:
    """The same for `--json`."""
    return {
        "cache": str(where.folder.parent),
        "name": where.name,
        "dry_run": True,
        "texts": plan.texts,
        "unique": plan.unique,
        "cached_before": plan.cached,
        "to_encode": plan.to_do,
        "tokens": plan.tokens,
        "tokens_per_text": {
            "least": plan.shortest,
            "median": plan.median,
            "most": plan.longest,
        },
        "truncated": len(plan.cut),
        "bytes": plan.bytes,
        "shards": len(plan.chunks),
        "seconds": round(seconds, 3),
    }


def _shards(count: int) -> str:
    return "1 shard" if count == 1 else f"{count:,} shards"


def _duration(seconds: float) -> str:
    return f"{seconds:.2g} s" if seconds < 60 else str(timedelta(seconds=round(seconds)))


def _how_to_read(where: Encodings) -> str:
    cache = str(where.folder.parent)
    return f"enginecast.cache.open_cache({cache!r}, {where.name!r}).by_text(TEXT)"
