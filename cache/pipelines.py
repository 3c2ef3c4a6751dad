"""What each pipeline of diffusers does with its text encoders: `pipelines.json`.  No torch.

Whether a pipeline tells its encoder what is padding, and which rows it reads, decides what may be
left out of a cache.  No config says so; each row was read in the source that it names, and
tests/test_cache_pipelines.py holds it against the diffusers that is installed.
"""

import difflib
from dataclasses import replace
from functools import cache
from importlib.resources import files
from typing import Annotated

import msgspec
from msgspec import Meta

from enginecast.cache.request import EncoderRequest
from enginecast.cache.spec import Clean, Side, Size
from enginecast.errors import UsageError
from enginecast.runtime.manifest import Record

FILE = "pipelines.json"


class Part(Record, frozen=True, kw_only=True):
    """A text encoder of a pipeline, and how the pipeline uses it."""

    pipeline: str
    part: str
    """As the pipeline calls it: "text_encoder_2"."""
    model: str
    """Class of the encoder."""
    source: str
    """Where this was read: a file of diffusers."""
    function: str
    """In it: "FluxPipeline.encode_prompt"."""
    mask: bool
    """Whether the encoder is told what is padding."""
    keep_all: bool
    """Whether rows of padding are read."""
    extra_rows: Size
    skip_rows: Size
    max_length: Annotated[int, Meta(ge=1)]
    """Tokens that a text is padded and cut to, template included, where nobody says otherwise."""
    template: str
    clean: Clean
    padding_side: Side | None = None
    """Where the pipeline sets it; None: it leaves that to the tokenizer."""
    outputs: Annotated[tuple[str, ...], Meta(min_length=1)]
    """The outputs that are read."""
    note: str

    @property
    def name(self) -> str:
        return f"{self.pipeline}:{self.part}"


class Table(Record, frozen=True, kw_only=True):
    """The file."""

    diffusers: str
    """The version whose sources were read."""
    parts: tuple[Part, ...]


def read_table(content: bytes) -> Table:
    """Read and check the file's content.

    Raises:
        ValueError: it is no such table, a row is there twice, or its template has no braces.
    """
    table = msgspec.json.decode(content, type=Table)
    seen = set()
    for part in table.parts:
        if part.name in seen or part.template.count("{}") != 1:
            raise ValueError(f"{FILE}: {part.name} is there twice, or its template has no one {{}}")
        seen.add(part.name)
    return table


@cache
def table() -> Table:
    """The table as it is packaged."""
    return read_table(files("enginecast.cache").joinpath(FILE).read_bytes())


def part_of(name: str) -> Part:
    """A row by "PIPELINE:PART", or "PIPELINE" where that has one text encoder.

    Raises:
        UsageError: there is none, or several to choose from; lists them.
    """
    pipeline, _, part = name.partition(":")
    parts = {found.part: found for found in table().parts if found.pipeline == pipeline}
    if not parts:
        known = list(dict.fromkeys(found.pipeline for found in table().parts))
        close = difflib.get_close_matches(pipeline, known, n=1)
        meant = f"Did you mean {close[0]!r}?  " if close else ""
        raise UsageError(
            f"--for {name}: no such pipeline is known",
            hint=f"{meant}Known: {', '.join(known)}.  For others leave --for out, and say --mask or"
            " --no-mask, --keep-all or --trim, --max-length.",
        )
    if not part and len(parts) == 1:
        return next(iter(parts.values()))
    if part not in parts:
        what = f"has no part {part!r}" if part else "has several text encoders"
        names = ", ".join(found.name for found in parts.values())
        raise UsageError(f"--for {name}: {pipeline} {what}", hint=f"There are: {names}.")
    return parts[part]


def resolve(request: EncoderRequest) -> EncoderRequest:
    """Fill in what a request leaves to its pipeline; what it says itself stays.

    Returns:
        The request itself where it names no pipeline.

    Raises:
        UsageError: the pipeline is not known, or an option would store other rows than those that
            the pipeline reads.
    """
    if request.pipeline is None:
        return request
    part = part_of(request.pipeline)
    _refuse_wrong_rows(request, part)
    given = {
        field: getattr(part, field)
        for field in (
            "template",
            "clean",
            "max_length",
            "mask",
            "keep_all",
            "extra_rows",
            "skip_rows",
            "padding_side",
        )
        if getattr(request, field) is None
    }
    return replace(request, outputs=request.outputs or part.outputs, **given)


def _refuse_wrong_rows(request: EncoderRequest, part: Part) -> None:
    """Refuse what no reader could notice later: the rows would be there, and be others."""
    wrong = _wrong_rows(request, part)
    if wrong is None:
        return
    option, why = wrong
    raise UsageError(
        f"--for {request.pipeline} with {option}: {why}, so the cache would hold other rows than"
        " the pipeline reads",
        hint=f"Leave {option} out; or leave --for out, if this is for something else.  See"
        f" {part.function} in diffusers {table().diffusers}.",
    )


def _wrong_rows(request: EncoderRequest, part: Part) -> tuple[str, str] | None:
    """The option that contradicts the pipeline, and what the pipeline does."""
    if request.mask is not None and request.mask != part.mask:
        told = "tells" if part.mask else "does not tell"
        return "--mask" if request.mask else "--no-mask", f"it {told} the encoder what is padding"
    if part.keep_all and request.keep_all is False:
        return "--trim", "it reads rows of padding"
    if (request.extra_rows or 0) < part.extra_rows and request.extra_rows is not None:
        return f"--extra-rows {request.extra_rows}", f"it reads {part.extra_rows} rows of padding"
    if request.skip_rows is not None and request.skip_rows > part.skip_rows:
        read = f"it drops {part.skip_rows} rows" if part.skip_rows else "it drops no rows"
        return f"--skip-rows {request.skip_rows}", f"{read} in front"
    other = request.template not in (None, part.template)
    if other and part.skip_rows and request.skip_rows is None:
        return "--template", f"it drops {part.skip_rows} rows in front: those of its own template"
    return None
