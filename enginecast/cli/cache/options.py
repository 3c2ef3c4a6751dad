"""Options of `enginecast cache fill`."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from enginecast.cli.options.from_fields import LoadFlags, said
from enginecast.compiler.request import ModelOptions
from enginecast.option_fields import Option

if TYPE_CHECKING:
    from enginecast.cache.encoders.request import EncoderRequest


_stored = partial(Option, heading="Storage and workers")


@dataclass(frozen=True)
class EncoderFlags:
    """How texts go into an encoder, and what is kept of it; see `EncoderRequest`."""

    HEADING: ClassVar[str] = "Encoder"

    pipeline: Annotated[
        str | None,
        Option(
            "Options for a diffusion pipeline: flux:text_encoder_2.", "PIPELINE[:PART]", flag="for"
        ),
    ] = None
    tokenizer: Annotated[str | None, Option("Tokenizer folder, or tokenizer.json.", "PATH")] = None
    template: Annotated[str | None, Option("Template; {} is replaced by each text.", "TEXT")] = None
    clean: Annotated[
        str | None,
        Option("Clean texts: none, strip, lower-strip, whitespace, empty-is-space, quoted.", "HOW"),
    ] = None
    max_length: Annotated[int | None, Option("Maximum tokens per text.", "N", least=1)] = None
    mask: Annotated[
        bool | None, Option("Give the encoder a padding mask, or not.", flag="mask/--no-mask")
    ] = None
    keep_all: Annotated[
        bool | None, Option("Keep or drop padding rows.", flag="keep-all/--trim")
    ] = None
    extra_rows: Annotated[
        int | None, Option("Padding rows to keep after the text.", "N", least=0)
    ] = None
    skip_rows: Annotated[int | None, Option("Rows to drop at the start.", "N", least=0)] = None
    outputs: Annotated[Sequence[str], said(ModelOptions, "outputs")] = ()
    precision: Annotated[
        str | None, Option("Precision of an eager model: fp32, bf16, fp16.", "NAME")
    ] = None
    store_dtype: Annotated[
        str | None, Option("Store as float32, bfloat16 or float16; default: as is.", "NAME")
    ] = None
    random_weights: Annotated[int | None, said(ModelOptions, "random_weights")] = None
    device: Annotated[str | None, said(LoadFlags, "device")] = None
    providers: Annotated[Sequence[str], said(LoadFlags, "providers")] = ()
    threads: Annotated[int | None, said(LoadFlags, "threads")] = None
    allow_code: Annotated[bool, said(LoadFlags, "allow_code")] = False
    public_key: Annotated[Path | None, said(LoadFlags, "public_key")] = None

    def request(self, model: str) -> "EncoderRequest":
        from enginecast.cache.encoders.request import EncoderRequest

        given: dict[str, Any] = dict(vars(self))
        given["outputs"] = tuple(name for names in self.outputs for name in names.split(","))
        given["providers"] = self.providers or None
        return EncoderRequest(model, **given)


@dataclass(frozen=True)
class FillFlags:
    """What else a user says of a fill."""

    HEADING: ClassVar[str] = ""

    column: Annotated[
        str | None, Option("Text column; default: caption, text or prompt.", "NAME")
    ] = None
    name: Annotated[str | None, Option("Name of this encoder in the cache.", "NAME")] = None
    too_long: Annotated[
        str | None,
        Option(
            "How to handle texts that are too long; default: error, and truncate with --for, as"
            " pipelines do.",
            "error|truncate",
        ),
    ] = None
    batch_tokens: Annotated[int, _stored("Tokens per batch, including padding.", "N", least=1)] = (
        16384
    )
    shard_size: Annotated[str, _stored("Approximate shard size.", "SIZE")] = "256MB"
    max_disk: Annotated[str | None, _stored("Size limit of the cache.", "SIZE")] = None
    dry_run: Annotated[bool, Option("Show what would be done; write nothing.")] = False
    runner: Annotated[str, _stored("Where to run.", "local|ray")] = "local"
    workers: Annotated[int | None, _stored("Number of workers (ray).", "N", least=1)] = None
    ray_address: Annotated[
        str | None,
        _stored("Address of a running cluster; default: start a local one.", "ADDRESS"),
    ] = None
    as_json: bool = False
    quiet: bool = False
