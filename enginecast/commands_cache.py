"""What the commands do that look after a cache.  None imports torch, but an export as `.pt`."""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from enginecast.cache.census import census_of
from enginecast.cache.checking import check_store
from enginecast.cache.comparing import compare
from enginecast.cache.exporting import export
from enginecast.cache.index import open_index
from enginecast.cache.merging import merge
from enginecast.cache.pruning import prune_store
from enginecast.cache.store import Encodings, open_store
from enginecast.commands_engine import print_json
from enginecast.errors import UsageError
from enginecast.terminal import results, results_apart, say
from enginecast.upkeep_page import (
    census_json,
    comparison_json,
    show_census,
    show_checked,
    show_comparison,
    show_merged,
    show_pruned,
    watched,
)


@results_apart()
def run_info(cache: Path, *, name: str | None, as_json: bool) -> None:
    """Say what a cache holds."""
    store = open_store(cache)
    found = census_of(store, name)
    if as_json:
        encoders = [census_json(one) for one in found]
        print_json({"cache": str(store.root), "id": store.id, "encoders": encoders})
        return
    console = results()
    say(console, f"{store.root}" + ("" if found else ": no encoder yet"))
    for one in found:
        show_census(one, console)


@results_apart()
def run_verify(cache: Path, *, name: str | None, as_json: bool) -> int:
    """Check every byte; return the exit code: 1 when something was damaged."""
    store = open_store(cache)
    names = [name] if name else store.names()
    shards = sum(len(list((store.root / one / "shards").glob("*"))) for one in names)
    with watched("shards", shards) as told:
        found = check_store(store, name, lambda _: told())
    whole = not any(one.damages for one in found)
    if as_json:
        encoders = [msgspec.to_builtins(one) for one in found]
        print_json({"cache": str(store.root), "whole": whole, "encoders": encoders})
        return 0 if whole else 1
    console = results()
    for one in found:
        show_checked(one, console)
    say(console, "every byte is as it was written" if whole else "not whole; see above")
    return 0 if whole else 1


@results_apart()
def run_prune(
    cache: Path,
    *,
    name: str | None,
    keep: Path | None,
    column: str | None,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Remove what is not needed."""
    store = open_store(cache)
    texts: Sequence[str] | None = None
    if keep is not None:
        from enginecast.cache.texts import read_texts

        texts = read_texts(keep, column)
    elif column is not None:
        raise UsageError(f"--column {column}: only for --keep FILE")
    found = prune_store(store, name, texts, dry_run=dry_run)
    if as_json:
        encoders = [msgspec.to_builtins(one) for one in found]
        print_json({"cache": str(store.root), "dry_run": dry_run, "encoders": encoders})
        return
    console = results()
    for one in found:
        show_pruned(one, console, dry_run=dry_run)


@results_apart()
def run_merge(caches: Sequence[Path], output: Path, *, as_json: bool) -> None:
    """Put the entries of several caches into one."""
    found = merge(caches, output)
    if as_json:
        encoders = [msgspec.to_builtins(one) for one in found]
        print_json({"cache": str(output.resolve()), "encoders": encoders})
        return
    console = results()
    for one in found:
        show_merged(one, console)
    say(console, str(output))


@results_apart()
def run_export(cache: Path, output: Path, *, name: str | None, form: str, as_json: bool) -> None:
    """Write the entries for other tools."""
    encodings = open_store(cache).encodings(name)
    with watched("texts", len(open_index(encodings, keep=False))) as told:
        done = export(encodings, output, form, told)
    if as_json:
        print_json(
            {
                "output": str(done.path),
                "name": encodings.name,
                "format": done.form,
                "texts": done.texts,
                "bytes": done.bytes,
            }
        )
        return
    say(results(), f"{done.path}: {done.texts:,} texts, {done.bytes:,} bytes ({done.form})")


@results_apart()
def run_compare(first: Path, second: Path, *, name: str | None, worst: int, as_json: bool) -> None:
    """Compare the entries of two caches."""
    sides = _sides(first, second, name)
    with watched("texts", len(open_index(sides[0], keep=False))) as told:
        found = compare(*sides, worst=worst, watch=told)
    if as_json:
        folders = {"first": str(sides[0].folder), "second": str(sides[1].folder)}
        print_json({**folders, **comparison_json(found)})
        return
    console = results()
    for letter, side in zip("AB", sides, strict=True):
        say(console, f"{letter}: {side.folder} ({side.about.encoder} from {side.about.source})")
    show_comparison(found, console)


def _sides(first: Path, second: Path, name: str | None) -> tuple[Encodings, Encodings]:
    """The encoders of two caches: each one's only one, one name in both, or "NAME,NAME"."""
    names = name.split(",") if name else [None]
    if len(names) > 2:
        raise UsageError(f"--name {name}: expected a name, or one for A and one for B")
    return open_store(first).encodings(names[0]), open_store(second).encodings(names[-1])
