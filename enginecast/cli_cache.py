"""`enginecast cache`: text-encoder outputs, computed once and read without the encoder."""

from pathlib import Path
from typing import Annotated

import typer

from enginecast.cli_cache_upkeep import COMMANDS, DryRun
from enginecast.cli_options import (
    AllowCode,
    AsJson,
    Device,
    Outputs,
    Provider,
    Quiet,
    RandomWeights,
    Threads,
)

app = typer.Typer(
    help="Precompute text-encoder outputs, and look after them.",
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    no_args_is_help=True,
)


@app.command()
def fill(
    encoder: Annotated[
        str, typer.Argument(metavar="ENCODER", help="A bundle, or a Hugging Face folder (eager).")
    ],
    texts: Annotated[
        Path,
        typer.Option(
            metavar="FILE", help=".txt, .jsonl, .csv, .parquet, or a Hugging Face dataset's folder."
        ),
    ],
    cache: Annotated[Path, typer.Option("-o", "--output", metavar="CACHE", help="The cache.")],
    column: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Column; else the one of caption, text, prompt."),
    ] = None,
    name: Annotated[
        str | None, typer.Option(metavar="NAME", help="What the cache calls this encoder.")
    ] = None,
    pipeline: Annotated[
        str | None,
        typer.Option(
            "--for", metavar="PIPELINE[:PART]", help="As a pipeline uses it: flux:text_encoder_2."
        ),
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(metavar="PATH", help="Tokenizer folder, or tokenizer.json.")
    ] = None,
    template: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Each text goes in place of {}.")
    ] = None,
    clean: Annotated[
        str | None, typer.Option(metavar="HOW", help="none, strip, lower-strip, whitespace.")
    ] = None,
    max_length: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Longest text, in tokens.")
    ] = None,
    mask: Annotated[
        bool | None,
        typer.Option("--mask/--no-mask", help="Whether the encoder is told what is padding."),
    ] = None,
    keep_all: Annotated[
        bool | None, typer.Option("--keep-all/--trim", help="Keep the rows of padding.")
    ] = None,
    extra_rows: Annotated[
        int | None, typer.Option(metavar="N", min=0, help="Rows of padding kept behind the text.")
    ] = None,
    skip_rows: Annotated[
        int | None, typer.Option(metavar="N", min=0, help="Rows dropped in front.")
    ] = None,
    outputs: Outputs = None,
    precision: Annotated[
        str | None, typer.Option(metavar="NAME", help="Of an eager model: fp32, bf16, fp16.")
    ] = None,
    store_dtype: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="float32, bfloat16, float16; default: as given."),
    ] = None,
    too_long: Annotated[
        str, typer.Option(metavar="error|truncate", help="What to do with longer texts.")
    ] = "error",
    batch_tokens: Annotated[
        int, typer.Option(metavar="N", min=1, help="Tokens in a batch, padding included.")
    ] = 16384,
    shard_size: Annotated[
        str, typer.Option(metavar="SIZE", help="Bytes in a shard, about: 256MB.")
    ] = "256MB",
    max_disk: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Refuse to let the cache grow beyond this.")
    ] = None,
    dry_run: DryRun = False,
    engine: Annotated[
        str, typer.Option(metavar="local|ray", help="Where the work is done.")
    ] = "local",
    workers: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Encoders at work at once (ray).")
    ] = None,
    ray_address: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="A running cluster; default: a local one.")
    ] = None,
    random_weights: RandomWeights = None,
    device: Device = None,
    provider: Provider = None,
    threads: Threads = None,
    allow_code: AllowCode = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Encode texts and store the outputs; goes on where an earlier fill was stopped."""
    from enginecast.cache.request import EncoderRequest
    from enginecast.commands_cache_fill import FillOptions, run_fill

    request = EncoderRequest(
        model=encoder,
        tokenizer=tokenizer,
        pipeline=pipeline,
        template=template,
        clean=clean,  # type: ignore[arg-type]  # checked where the spec is made
        max_length=max_length,
        mask=mask,
        keep_all=keep_all,
        extra_rows=extra_rows,
        skip_rows=skip_rows,
        outputs=tuple(name for names in outputs or () for name in names.split(",")),
        precision=precision,
        store_dtype=store_dtype,  # type: ignore[arg-type]
        random_weights=random_weights,
        device=device,
        providers=tuple(provider) if provider else None,
        threads=threads,
        allow_code=allow_code,
    )
    options = FillOptions(
        texts=texts,
        column=column,
        cache=cache,
        name=name,
        too_long=too_long,
        batch_tokens=batch_tokens,
        shard_size=shard_size,
        max_disk=max_disk,
        dry_run=dry_run,
        engine=engine,
        workers=workers,
        ray_address=ray_address,
        as_json=as_json,
        quiet=quiet,
    )
    raise typer.Exit(run_fill(request, options))


for command in COMMANDS:
    app.command()(command)
