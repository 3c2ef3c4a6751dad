"""`enginecast cache`: text-encoder outputs, computed once and read without the encoder.

What a command needs is imported when it runs.
"""

from pathlib import Path
from typing import Annotated

import typer
from msgspec import to_builtins

from enginecast.cli.cache.options import EncoderFlags, FillFlags
from enginecast.cli.options.from_fields import AsJson, Download, Quiet, fetched, grouped, shown
from enginecast.cli.terminal.output import print_json, results, results_apart, say
from enginecast.errors import UsageError

CacheDir = Annotated[Path, typer.Argument(metavar="CACHE", help="An embedding cache.")]
EveryName = Annotated[
    str | None, typer.Option(metavar="NAME", help="Only this encoder of the cache.")
]
DryRun = Annotated[bool, shown(FillFlags, "dry_run")]

app = typer.Typer(
    help="Precompute and manage text-encoder outputs.",
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    no_args_is_help=True,
)


@app.command()
@grouped
@results_apart()
def fill(
    encoder: Annotated[
        str,
        typer.Argument(metavar="ENCODER", help="A bundle, or a Hugging Face folder (runs eager)."),
    ],
    prompts: Annotated[
        Path,
        typer.Option(
            metavar="FILE",
            help="Texts: .txt, .jsonl, .csv, .parquet, or a Hugging Face dataset's folder.",
        ),
    ],
    cache: Annotated[
        Path, typer.Option("-o", "--output", metavar="CACHE", help="New or existing cache.")
    ],
    encoder_flags: EncoderFlags,
    flags: FillFlags,
    download: Download = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Encode texts and store the outputs.

    Resumes a fill that was stopped.
    """
    from enginecast.cli.cache.fill import run_fill

    request = encoder_flags.request(fetched(encoder) if download else encoder)
    raise typer.Exit(run_fill(request, prompts, cache, flags))


@app.command()
@results_apart()
def info(cache: CacheDir, name: EveryName = None, as_json: AsJson = False) -> None:
    """Show encoders, texts, sizes and failures of a cache."""
    from enginecast.cache.store.folders import open_store
    from enginecast.cache.upkeep.census import census_of
    from enginecast.cli.cache.upkeep_page import census_json, show_census

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


@app.command()
@results_apart()
def verify(cache: CacheDir, name: EveryName = None, as_json: AsJson = False) -> None:
    """Read every byte, and quarantine damaged shards.

    The next fill encodes what was lost.
    """
    from enginecast.cache.store.folders import open_store
    from enginecast.cache.upkeep.checking import check_store
    from enginecast.cli.cache.upkeep_page import show_checked, watched

    store = open_store(cache)
    names = [name] if name else store.names()
    shards = sum(len(list((store.root / one / "shards").glob("*"))) for one in names)
    with watched("shards", shards) as step:
        found = check_store(store, name, lambda _: step())
    whole = not any(one.damages for one in found)
    if as_json:
        print_json({"cache": str(store.root), "whole": whole, "encoders": to_builtins(found)})
    else:
        console = results()
        for one in found:
            show_checked(one, console)
        say(console, "every byte is as it was written" if whole else "not whole; see above")
    raise typer.Exit(0 if whole else 1)


@app.command()
@results_apart()
def prune(
    cache: CacheDir,
    name: EveryName = None,
    keep: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Keep only these texts and the empty one.")
    ] = None,
    column: Annotated[
        str | None, typer.Option(metavar="NAME", help="Column of the texts to keep.")
    ] = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Remove what is not needed, and join small shards.

    Removes leftovers, quarantined shards and duplicates; with --keep, all texts not in a file.
    """
    from enginecast.cache.fill.texts import read_texts
    from enginecast.cache.store.folders import open_store
    from enginecast.cache.upkeep.pruning import prune_store
    from enginecast.cli.cache.upkeep_page import show_pruned

    store = open_store(cache)
    if keep is None and column is not None:
        raise UsageError(f"--column {column}: only for --keep FILE")
    texts = None if keep is None else read_texts(keep, column)
    found = prune_store(store, name, texts, dry_run=dry_run)
    if as_json:
        print_json({"cache": str(store.root), "dry_run": dry_run, "encoders": to_builtins(found)})
        return
    console = results()
    for one in found:
        show_pruned(one, console, dry_run=dry_run)


@app.command()
@results_apart()
def merge(
    caches: Annotated[list[Path], typer.Argument(metavar="CACHE...", help="Caches to read.")],
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="CACHE", help="New or existing cache.")
    ],
    as_json: AsJson = False,
) -> None:
    """Merge the entries of several caches into one.

    The output may already exist.
    """
    from enginecast.cache.upkeep.merging import merge as merge_caches
    from enginecast.cli.cache.upkeep_page import show_merged

    found = merge_caches(caches, output)
    if as_json:
        print_json({"cache": str(output.resolve()), "encoders": to_builtins(found)})
        return
    console = results()
    for one in found:
        show_merged(one, console)
    say(console, str(output))


@app.command()
@results_apart()
def export(
    cache: CacheDir,
    output: Annotated[Path, typer.Option("-o", "--output", metavar="PATH", help="File or folder.")],
    name: Annotated[
        str | None,
        typer.Option(
            metavar="NAME[,NAME]",
            help="Which encoder, if the cache has several; or one for each that a trainer needs.",
        ),
    ] = None,
    form: Annotated[
        str,
        typer.Option(
            "--format",
            metavar="NAME",
            help="parquet, safetensors, pt, npz, or a trainer's: musubi:wan, kohya:sdxl, ...",
        ),
    ] = "parquet",
    items: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="For a trainer: a .jsonl with the image or video of each text."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Export the entries for other tools.

    Writes one parquet file, or a folder with one file per text; for a trainer, one per item.
    """
    from enginecast.cache.store.folders import open_store
    from enginecast.cache.store.index import open_index
    from enginecast.cache.upkeep.exporting import FORMATS
    from enginecast.cache.upkeep.exporting import export as export_entries
    from enginecast.cache.upkeep.trainers import plan_export
    from enginecast.cli.cache.upkeep_page import watched

    store = open_store(cache)
    if form in FORMATS:
        if items is not None:
            raise UsageError(f"--items {items}: only for --format TRAINER:ARCHITECTURE")
        encodings = store.encodings(name)
        named = encodings.name
        with watched("texts", len(open_index(encodings, keep=False))) as step:
            done = export_entries(encodings, output, form, step)
    else:
        plan = plan_export(store, form, items, name.split(",") if name else ())
        named = ",".join(plan.encoders)
        with watched("texts", len(plan.items)) as step:
            done = plan.write(output, step)
    if as_json:
        made = {"output": str(output), "name": named, "format": form}
        print_json({**made, **to_builtins(done)})
        return
    say(results(), f"{output}: {done.texts:,} texts, {done.bytes:,} bytes ({form})")


@app.command()
@results_apart()
def compare(
    first: Annotated[Path, typer.Argument(metavar="A", help="A cache: the reference.")],
    second: Annotated[Path, typer.Argument(metavar="B", help="A cache to compare with it.")],
    name: Annotated[
        str | None,
        typer.Option(metavar="NAME[,NAME]", help="Encoder; or one for A and one for B."),
    ] = None,
    worst: Annotated[
        int, typer.Option(metavar="N", min=0, help="Number of worst texts to list.")
    ] = 10,
    as_json: AsJson = False,
) -> None:
    """Compare the entries of two caches, text by text.

    Shows cosine and relative error.
    """
    from enginecast.cache.store.folders import open_store
    from enginecast.cache.store.index import open_index
    from enginecast.cache.upkeep.comparing import compare as compare_caches
    from enginecast.cli.cache.upkeep_page import comparison_json, show_comparison, watched

    names = name.split(",") if name else [None]
    if len(names) > 2:
        raise UsageError(f"--name {name}: expected a name, or one for A and one for B")
    sides = open_store(first).encodings(names[0]), open_store(second).encodings(names[-1])
    with watched("texts", len(open_index(sides[0], keep=False))) as step:
        found = compare_caches(*sides, worst=worst, watch=step)
    if as_json:
        folders = {"first": str(sides[0].folder), "second": str(sides[1].folder)}
        print_json({**folders, **comparison_json(found)})
        return
    console = results()
    for letter, side in zip("AB", sides, strict=True):
        say(console, f"{letter}: {side.folder} ({side.about.encoder} from {side.about.source})")
    show_comparison(found, console)
