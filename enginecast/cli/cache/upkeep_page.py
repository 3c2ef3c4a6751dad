"""What the commands that look after a cache print: lines that no narrow terminal breaks."""

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from enginecast.cache.store.spec import EncoderSpec
from enginecast.cache.upkeep.census import Census
from enginecast.cache.upkeep.checking import Checked, Damage
from enginecast.cache.upkeep.comparing import Comparison
from enginecast.cache.upkeep.merging import Merged
from enginecast.cache.upkeep.pruning import Pruned
from enginecast.cli.terminal.output import progress, say

_SHOWN = 5
"""Lost texts that are named; the note in the quarantine has all."""
_LONGEST = 60
"""Characters of a text that are shown."""


@contextmanager
def watched(what: str, total: int) -> Iterator[Any]:
    """Show on a terminal how far something is; yields what to call at each step."""
    console = progress()
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as shown:
        task = shown.add_task(what, total=total)
        yield lambda steps=1: shown.advance(task, steps)


def show_census(one: Census, console: Console) -> None:
    """One encoder of `cache info`."""
    about, spec = one.about, one.spec
    engine = spec.engine.get("target", "an engine") if spec.engine else "eager"
    verdict = f" ({about.verdict})" if about.verdict else ""
    say(console, f"{one.name}: {about.encoder} from {about.source}", "bold")
    lines = [("computed", f"{spec.precision}, {engine}{verdict}"), *_stored(one), *_input(spec)]
    lines += [("output", f"{o.name}: {o.dtype}, {o.width} values a {o.per}") for o in spec.outputs]
    say_lines(console, [*lines, *_wrong(one)])


def _stored(one: Census) -> Iterator[tuple[str, str]]:
    if one.tokens is None:
        yield "texts", "none"
        return
    least, median, most = one.tokens
    yield "texts", f"{one.texts:,} of {least} to {most} tokens, half of them up to {median:g}"
    yield "rows", f"{one.rows:,}"
    yield "disk", f"{decimal(one.bytes)} in {counted(one.shards, 'shard')}"
    times = one.padded_bytes / one.bytes
    padded = decimal(one.padded_bytes)
    yield "padded fp32", f"{padded} as a file a text, {times:.1f} times as much"


def _input(spec: EncoderSpec) -> Iterator[tuple[str, str]]:
    given = "a" if spec.mask else "no"
    yield "padding", f"the encoder gets {given} padding mask; longest text {spec.max_length} tokens"
    rows = "of the tokens" if spec.rows == "real" else f"all {spec.max_length}"
    rows += f", {spec.extra_rows} of padding" if spec.extra_rows else ""
    rows += f", without the first {spec.skip_rows}" if spec.skip_rows else ""
    yield "rows kept", rows
    if spec.template != "{}":
        yield "template", spec.template
    if spec.clean != "none":
        yield "cleaned", spec.clean


def _wrong(one: Census) -> Iterator[tuple[str, str]]:
    if one.failed:
        reasons = "; ".join(f"{reason}: {count:,}" for reason, count in one.failed.items())
        yield "failed", f"{counted(sum(one.failed.values()), 'text')}: {reasons}"
    if one.truncated:
        yield "cut", counted(one.truncated, "text")
    leftovers = counted(one.leftovers, "leftover")
    parts = {
        f"{leftovers} of killed writers ({decimal(one.leftover_bytes)})": one.leftovers,
        f"{one.quarantined} in quarantine ({decimal(one.quarantined_bytes)})": one.quarantined,
        counted(one.doubles, "double"): one.doubles,
    }
    if any(parts.values()):
        yield "to prune", ", ".join(part for part, count in parts.items() if count)
    for problem in one.damaged:
        yield "damaged", f"{problem}; run `enginecast cache verify`"


def census_json(one: Census) -> dict[str, Any]:
    """The same for `--json`, and the spec whole."""
    made: dict[str, Any] = msgspec.to_builtins(one)
    del made["about"]["config"]  # the model's own, which is long
    least, median, longest = one.tokens or (None, None, None)
    made["tokens"] = {"least": least, "median": median, "longest": longest}
    return made


def show_checked(one: Checked, console: Console) -> None:
    """One encoder of `cache verify`."""
    read = (
        f"{counted(one.shards, 'shard')}, {counted(one.texts, 'text')}, {decimal(one.bytes)} read"
    )
    say(console, f"{one.name}: {read}; {counted(len(one.damages), 'damaged file')}")
    for damage in one.damages:
        say(console, f"  {damage.file}: {damage.problem}", "bold red")
        say_lines(console, _damage(damage), indent=4)


def _damage(damage: Damage) -> Iterator[tuple[str, str]]:
    if damage.quarantine:
        yield "moved to", damage.quarantine
        yield "saved", counted(damage.salvaged, "text")
        named = ", ".join(repr(_short(text)) for text in damage.lost[:_SHOWN])
        more = f" and {len(damage.lost) - _SHOWN:,} more" if len(damage.lost) > _SHOWN else ""
        yield "lost", counted(len(damage.lost), "text") + (f": {named}{more}" if named else "")
    if damage.stays:
        yield "stays", damage.stays
    yield "now", damage.hint


def show_pruned(one: Pruned, console: Console, *, dry_run: bool) -> None:
    """One encoder of `cache prune`."""
    freed = f"{decimal(abs(one.freed))} {'more' if one.freed < 0 else 'freed'}"
    head = f"{freed}, {counted(one.kept, 'text')} kept"
    say(console, f"{one.name}: {head}" + ("; nothing was removed (--dry-run)" if dry_run else ""))
    lines = {
        "leftovers": one.leftovers,
        "quarantined": one.quarantined,
        "doubles": one.doubles,
        "unwanted": one.unwanted,
    }
    say_lines(console, [(name, f"{count:,}") for name, count in lines.items() if count])
    if one.rewritten:
        made = f"{counted(one.rewritten, 'shard')} replaced by {one.made}"
        say_lines(console, [("joined", made)])


def show_merged(one: Merged, console: Console) -> None:
    """One encoder of `cache merge`."""
    say(
        console,
        f"{one.name}: {counted(one.added, 'text')} added, {one.there:,} already there or given"
        f" twice, {one.texts:,} in all",
    )
    shards = f"{one.shards} taken whole, of {one.rewritten} what was lacking"
    say_lines(console, [("shards", shards)])


def show_comparison(one: Comparison, console: Console) -> None:
    """The whole of `cache compare`."""
    by = "token ids" if one.joined_by == "ids" else "text"
    say(
        console,
        f"{counted(one.texts, 'text')} compared, joined by {by};"
        f" only in A {one.only_first:,}, only in B {one.only_second:,}",
    )
    for field in one.differs:
        say(console, f"  differs       {field}")
    for output in one.outputs:
        say(console, f"{output.name}: {counted(output.rows, 'row')}", "bold")
        cosines = (output.cosine_least, output.cosine_p1, output.cosine_median)
        least, low, median = (f"{cosine:.9f}" for cosine in cosines)
        relative = f"median {output.relative_median:.3g}, largest {output.relative_largest:.3g}"
        lines = [
            ("cosine", f"least {least}, 1 % below {low}, median {median}"),
            ("error", f"L2 of a text, relative: {relative}"),
            ("largest", f"difference of two values: {output.largest:.3g}"),
        ]
        say_lines(console, lines)
    if one.worst:
        say(console, "furthest off:", "bold")
    for text in one.worst:
        where = "" if text.token is None else f" at token {text.token}"
        say(
            console,
            f"  error {text.relative:.3g}, cosine {text.cosine:.6f}{where} ({text.output}):"
            f" {_short(text.text)!r}",
        )


def comparison_json(one: Comparison) -> dict[str, Any]:
    """The same for `--json`; an error relative to nothing is null."""
    made: dict[str, Any] = msgspec.to_builtins(one)
    for part in (*made["outputs"], *made["worst"]):
        for name, value in part.items():
            if isinstance(value, float) and not math.isfinite(value):
                part[name] = None
    return made


def say_lines(console: Console, lines: Iterable[tuple[str, str]], indent: int = 2) -> None:
    for name, value in lines:
        say(console, f"{' ' * indent}{name:<13} {value}")


def counted(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
