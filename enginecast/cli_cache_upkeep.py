"""The commands of `enginecast cache` that look after a cache."""

from pathlib import Path
from typing import Annotated

import typer

from enginecast.cli_options import AsJson

CacheDir = Annotated[Path, typer.Argument(metavar="CACHE", help="An embedding cache.")]
EveryName = Annotated[
    str | None, typer.Option(metavar="NAME", help="Only this encoder of the cache.")
]
OneName = Annotated[
    str | None, typer.Option(metavar="NAME", help="Encoder, where the cache has several.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would be done; write nothing.")]


def info(cache: CacheDir, name: EveryName = None, as_json: AsJson = False) -> None:
    """What a cache holds: encoders, texts, sizes, what failed."""
    from enginecast.commands_cache import run_info

    run_info(cache, name=name, as_json=as_json)


def verify(cache: CacheDir, name: EveryName = None, as_json: AsJson = False) -> None:
    """Read every byte; damaged shards go to quarantine, and can be filled again."""
    from enginecast.commands_cache import run_verify

    raise typer.Exit(run_verify(cache, name=name, as_json=as_json))


def prune(
    cache: CacheDir,
    name: EveryName = None,
    keep: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Keep only these texts, and the empty one.")
    ] = None,
    column: Annotated[
        str | None, typer.Option(metavar="NAME", help="Column of the texts to keep.")
    ] = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Remove leftovers, quarantined shards and doubles; join small shards."""
    from enginecast.commands_cache import run_prune

    run_prune(cache, name=name, keep=keep, column=column, dry_run=dry_run, as_json=as_json)


def merge(
    caches: Annotated[list[Path], typer.Argument(metavar="CACHE...", help="Caches to read.")],
    output: Annotated[Path, typer.Option("-o", "--output", metavar="CACHE", help="Where to.")],
    as_json: AsJson = False,
) -> None:
    """Put the entries of several caches into one, new or there already."""
    from enginecast.commands_cache import run_merge

    run_merge(caches, output, as_json=as_json)


def export(
    cache: CacheDir,
    output: Annotated[Path, typer.Option("-o", "--output", metavar="PATH", help="File or folder.")],
    name: OneName = None,
    form: Annotated[
        str, typer.Option("--format", metavar="NAME", help="parquet, safetensors, pt, npz.")
    ] = "parquet",
    as_json: AsJson = False,
) -> None:
    """Write the entries for other tools: one parquet file, or one file a text."""
    from enginecast.commands_cache import run_export

    run_export(cache, output, name=name, form=form, as_json=as_json)


def compare(
    first: Annotated[Path, typer.Argument(metavar="A", help="A cache: the reference.")],
    second: Annotated[Path, typer.Argument(metavar="B", help="A cache to compare with it.")],
    name: Annotated[
        str | None,
        typer.Option(metavar="NAME[,NAME]", help="Encoder; two: of A and of B."),
    ] = None,
    worst: Annotated[int, typer.Option(metavar="N", min=0, help="Worst texts to list.")] = 10,
    as_json: AsJson = False,
) -> None:
    """Cosine and error between the entries of two caches, text by text."""
    from enginecast.commands_cache import run_compare

    run_compare(first, second, name=name, worst=worst, as_json=as_json)


COMMANDS = (info, verify, prune, merge, export, compare)
