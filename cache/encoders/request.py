"""What is asked of a fill, and what each pipeline of diffusers adds: `pipelines.json`.  No torch.

Whether a pipeline gives its encoder a padding mask, and which rows it reads, decides what may be
left out of a cache.  No config says so; each row was read in the source that it names, and
tests/cache/test_cache_pipelines.py holds it against the diffusers that is installed.
"""

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from enginecast.cache.store.spec import Clean, Side, Size
from enginecast.errors import UsageError
from enginecast.option_fields import takes_old_names
from enginecast.runtime.bundle.manifest import Record
from enginecast.runtime.bundle.pipeline_folder import INDEX

FILE = "pipelines.json"
_FROM = re.compile(r"hidden_states\.(\d+):")
TooLong = Literal["error", "truncate"]
StoreDtype = Literal["float32", "bfloat16", "float16"]


@takes_old_names
@dataclass(frozen=True)
class EncoderRequest:
    """An encoder as a user names it.  Plain values, so that any worker process can open it.

    Args:
        model: a bundle, or a Hugging Face folder, which is run eagerly.
        tokenizer: a folder or `tokenizer.json`; None: the model's own.
        pipeline: "flux:text_encoder_2": a row of `pipelines.json` gives what is None below.
        max_length: in tokens; None: what the model takes, or its tokenizer says.
        mask: whether the encoder gets a padding mask; None: where it takes one.
        keep_all: keep the rows of padding; None: only where the encoder gets no mask.
        padding_side: None: as the tokenizer's files say.
        template, clean, special_tokens, keep_end, extra_rows, skip_rows: as in `EncoderSpec`.
        outputs: names of the outputs to keep, and `hidden_states.N:` for all hidden states from
            there on; empty: all that an engine gives, and `last_hidden_state` of an eager model.
        precision: "fp32", "bf16" or "fp16" of an eager model; None: as its weights are stored.  An
            engine has its own.
        store_dtype: None: as the encoder gives them.
        random_weights: seed, for a folder with a config alone.
        device: "cpu" or "cuda"; None: "cpu".
        providers, threads, allow_code, public_key: see `runtime.load`.
    """

    model: str
    tokenizer: str | None = None
    pipeline: str | None = None
    template: str | None = None
    clean: Clean | None = None
    special_tokens: bool | None = None
    keep_end: bool | None = None
    max_length: int | None = None
    mask: bool | None = None
    keep_all: bool | None = None
    extra_rows: int | None = None
    skip_rows: int | None = None
    padding_side: Side | None = None
    outputs: tuple[str, ...] = ()
    precision: str | None = None
    store_dtype: StoreDtype | None = None
    random_weights: int | None = None
    device: str | None = None
    providers: tuple[str, ...] | None = None
    threads: int | None = None
    allow_code: bool = False
    public_key: Path | None = None


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
    """Whether padding is masked, where there is any."""
    keep_all: bool
    """Whether rows of padding are read."""
    extra_rows: Size
    skip_rows: Size
    skips_text: bool = False
    """Whether those are the first of the text, wherever its padding is, and not of the row."""
    max_length: Annotated[int, Meta(ge=1)] | None = None
    """Tokens that a text is padded and cut to, template included, where nobody says otherwise;
    None: as the tokenizer says."""
    template: str
    special_tokens: bool = True
    keep_end: bool = False
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


@cache
def table() -> Table:
    """The table as it is packaged."""
    content = files("enginecast.cache.encoders").joinpath(FILE).read_bytes()
    return msgspec.json.decode(content, type=Table)


def part_of(name: str) -> Part:
    """A row by "PIPELINE:PART", or "PIPELINE" where that has one text encoder; a UsageError that
    lists them where it is not one row.
    """
    pipeline, _, part = name.partition(":")
    parts = {found.part: found for found in table().parts if found.pipeline == pipeline}
    if not parts:
        known = list(dict.fromkeys(found.pipeline for found in table().parts))
        close = difflib.get_close_matches(pipeline, known, n=1)
        meant = f"Did you mean {close[0]!r}?  " if close else ""
        raise UsageError(
            f"--for {name}: no such pipeline is known",
            hint=f"{meant}Known: {', '.join(known)}.  For other pipelines, omit --for and say what"
            " they read with the other options, such as --outputs.",
        )
    if not part and len(parts) == 1:
        return next(iter(parts.values()))
    if part not in parts:
        what = f"has no part {part!r}" if part else "has several text encoders"
        names = ", ".join(found.name for found in parts.values())
        raise UsageError(f"--for {name}: {pipeline} {what}", hint=f"There are: {names}.")
    return parts[part]


def named_outputs(names: Sequence[str], layers: int | None) -> tuple[str, ...]:
    """Names of outputs with `hidden_states.N:` spelled out: all hidden states from N on.

    Args:
        layers: of the model, which has one hidden state more; None: not known.

    Raises:
        UsageError: they are asked for, and not known.
    """
    found: list[str] = []
    for name in names:
        first = _FROM.fullmatch(name)
        if first is None:
            found.append(name)
        elif layers is None:
            raise UsageError(
                f"--outputs {name}: nobody knows how many hidden states the model has",
                hint="Name each of them: --outputs hidden_states.0,hidden_states.1.",
            )
        else:
            found += [f"hidden_states.{index}" for index in range(int(first[1]), layers + 1)]
    return tuple(found)


def layers_in(config: Mapping[str, Any]) -> int | None:
    """How many layers the text model of a config.json has; None where it does not say."""
    found = {**config, **(config.get("text_config") or {})}.get("num_hidden_layers")
    return found if isinstance(found, int) else None


def offered(model: str) -> Part | None:
    """The row for a model's folder inside of a pipeline's, as diffusers saves one; None where no
    row says so.
    """
    folder = Path(model).resolve()
    try:
        index = msgspec.json.decode((folder.parent / INDEX).read_bytes())
        kind = index["_class_name"]
    except (OSError, ValueError, LookupError, TypeError):
        return None
    rows = (part for part in table().parts if part.function.partition(".")[0] == kind)
    return next((part for part in rows if part.part == folder.name), None)


def offer(model: str, what: str) -> str:
    """A line that offers the row for a model's folder; empty where there is none.

    Args:
        what: a command does with what the pipeline reads: "exports".
    """
    part = offered(model)
    if part is None:
        return ""
    kind = part.function.partition(".")[0]
    return f"part of a {kind}: --for {part.name} {what} what it reads"


def resolve(request: EncoderRequest) -> EncoderRequest:
    """Fill in what a request leaves to its pipeline; what it says itself stays.

    Raises:
        UsageError: the pipeline is not known, or an option would store other rows than it reads.
    """
    if request.pipeline is None:
        return request
    part = part_of(request.pipeline)
    wrong = _wrong_rows(request, part)
    if wrong is not None:  # no reader could notice later: the rows would be there, and be others
        option, why = wrong
        raise UsageError(
            f"--for {request.pipeline} with {option}: {why}, so the cache would hold other rows"
            " than the pipeline reads",
            hint=f"Leave {option} out; or leave --for out, if this is for something else.  See"
            f" {part.function} in diffusers {table().diffusers}.",
        )
    given = {
        field: getattr(part, field)
        for field in Part.__struct_fields__
        if getattr(request, field, "") is None
    }
    return replace(request, outputs=request.outputs or part.outputs, **given)


def _wrong_rows(request: EncoderRequest, part: Part) -> tuple[str, str] | None:
    """The option that contradicts the pipeline, and what the pipeline does."""
    if request.mask is not None and request.mask != part.mask:
        given = "gives" if part.mask else "does not give"
        return "--mask" if request.mask else "--no-mask", f"it {given} the encoder a padding mask"
    if part.keep_end and request.keep_all:
        return "--keep-all", "its padding is in front of the template's end, and is not read"
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
