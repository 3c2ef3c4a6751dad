"""The table of pipelines: what it says is what the installed diffusers does; what `--for` makes."""

import inspect
from pathlib import Path
from typing import Any

import diffusers
import pytest
from denoisers import DENOISERS
from pipeline_probe import (
    CLIP_LENGTH,
    POOLED,
    Reading,
    Recorder,
    build,
    encode,
    parts_of,
    readings,
    word_tokenizer,
)
from torch import Tensor

from enginecast.cache.encoders.request import EncoderRequest, Part, part_of, resolve, table
from enginecast.cache.encoders.tokenizing import clean_text
from enginecast.errors import UsageError

ROOT = Path(__file__).parents[2]
PIPELINES = list(dict.fromkeys(part.pipeline for part in table().parts))
PROMPTS = ["  A b\n c ", "d e &amp;amp; f g h"]
LENGTH_IN_SOURCE = {"latte": 120}
"""Pipelines whose length is not an argument."""


def probe(pipeline: str, folder: Path, side: str = "right") -> tuple[list[Reading], list[Tensor]]:
    """What the pipeline reads of its encoders, and what it returns.

    Args:
        side: on which the files of the tokenizer say that it pads.
    """
    parts = parts_of(pipeline)
    recorders = [Recorder(number, part) for number, part in enumerate(parts, start=1)]
    tokenizer = word_tokenizer(folder, CLIP_LENGTH, side)
    pipe = build(
        pipeline,
        {recorder.part.part: recorder for recorder in recorders},
        {part.part: tokenizer for part in parts},
    )
    # `__call__` hands this on; the default of `encode_prompt` is 226.
    others = {"max_sequence_length": 512} if pipeline == "wan" else {}
    returned = encode(pipe, PROMPTS, **others)
    return readings(recorders, returned), returned


def kept(part: Part, tokens: int) -> set[int]:
    end = part.max_length if part.keep_all else tokens + part.extra_rows
    return set(range(part.skip_rows, end))


def tokens_in(call: Any) -> list[int]:
    """The table's tokenizer pads with 0."""
    return [int(count) for count in (call.ids != 0).sum(dim=1)]


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_the_pipeline_reads_the_rows_that_the_table_keeps(pipeline: str, tmp_path: Path) -> None:
    found, _ = probe(pipeline, tmp_path)
    rows: dict[str, list[tuple[set[int], set[int]]]] = {}
    for reading in found:
        part = reading.part
        assert (reading.call.mask is not None) == part.mask, part.name
        assert reading.call.ids.shape[1] == part.max_length, part.name
        for read, tokens in zip(reading.rows, tokens_in(reading.call), strict=True):
            assert set(read) == set(part.outputs), part.name
            for name in set(read) - {"text_embeds", "pooler_output"}:
                rows.setdefault(part.name, []).append((read[name], kept(part, tokens)))
            assert all(read[name] == {POOLED} for name in read if "state" not in name)
    for name, pairs in rows.items():
        assert all(read <= stored for read, stored in pairs), name
        if name != "chroma:text_encoder":  # its transformer reads more: see below
            assert any(read == stored for read, stored in pairs), name
    assert {reading.part for reading in found} == set(parts_of(pipeline))


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_texts_go_in_as_the_table_says(pipeline: str, tmp_path: Path) -> None:
    """Padded as the tokenizer's files say, unless the table names a side: the pipeline sets it."""
    found, _ = probe(pipeline, tmp_path, "left")
    for part in parts_of(pipeline):
        tokenizer = word_tokenizer(tmp_path, CLIP_LENGTH, part.padding_side or "left")
        first = next(reading.call for reading in found if reading.part == part)
        texts = [part.template.replace("{}", clean_text(part.clean, text)) for text in PROMPTS]
        wanted = tokenizer(texts, padding="max_length", max_length=part.max_length)["input_ids"]
        assert first.ids.tolist() == wanted


@pytest.mark.parametrize("part", table().parts, ids=lambda part: part.name)
def test_the_source_is_there_and_the_length_is_its_default(part: Part) -> None:
    pipeline, _, function = part.function.partition(".")
    found = getattr(diffusers, pipeline)
    assert Path(inspect.getsourcefile(found) or "").as_posix().endswith(f"diffusers/{part.source}")
    assert callable(getattr(found, function))
    named = inspect.signature(found.__call__).parameters.get("max_sequence_length")
    if "CLIP" in part.model:
        assert part.max_length == CLIP_LENGTH
    elif named is None:
        assert part.max_length == LENGTH_IN_SOURCE[part.pipeline]
    else:
        assert part.max_length == named.default + part.skip_rows


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_every_mask_that_a_pipeline_returns_was_looked_into(pipeline: str, tmp_path: Path) -> None:
    _, returned = probe(pipeline, tmp_path)
    shapes = {one.shape[:2] for one in returned if one.ndim == 3}
    masked = any(one.ndim == 2 and one.shape in shapes for one in returned)
    assert masked == (pipeline in DENOISERS)


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (
            EncoderRequest("t5", pipeline="flux:text_encoder_2", mask=True),
            "--mask: it does not give",
        ),
        (EncoderRequest("t5", pipeline="wan", mask=False), "--no-mask: it gives"),
        (EncoderRequest("t5", pipeline="cogvideox", keep_all=False), "--trim: it reads rows of"),
        (EncoderRequest("t5", pipeline="wan", skip_rows=1), "--skip-rows 1: it drops no rows"),
        (
            EncoderRequest("l", pipeline="hunyuan-video:text_encoder", template="A {}"),
            "--template: it drops 95 rows in front",
        ),
    ],
)
def test_options_that_would_store_other_rows_are_refused(
    request_: EncoderRequest, words: str
) -> None:
    with pytest.raises(UsageError, match="other rows than the pipeline reads") as refused:
        resolve(request_)
    assert words in refused.value.message
    assert f"in diffusers {table().diffusers}" in refused.value.hint


@pytest.mark.parametrize(
    ("name", "words", "hint"),
    [
        ("fluks", "--for fluks: no such pipeline", "Did you mean 'flux'?"),
        ("qwen-image", "no such pipeline is known", "Known: allegro, auraflow, chroma"),
        ("flux", "flux has several text encoders", "flux:text_encoder, flux:text_encoder_2"),
        ("wan:text_encoder_2", "wan has no part 'text_encoder_2'", "There are: wan:text_encoder."),
    ],
)
def test_an_unknown_name_lists_those_there_are(name: str, words: str, hint: str) -> None:
    with pytest.raises(UsageError, match=words) as refused:
        part_of(name)
    assert hint in refused.value.hint


def table_lines() -> list[str]:
    """The table in Markdown."""
    return [
        "| `--for` | encoder | padding mask | rows kept | tokens | text | outputs |",
        "|---|---|---|---|---|---|---|",
        *map(line_of, table().parts),
    ]


def line_of(part: Part) -> str:
    rows = "all" if part.keep_all else "text"
    if part.skip_rows:
        rows += f", without the first {part.skip_rows}"
    text = ["" if part.clean == "none" else part.clean, "" if part.template == "{}" else "template"]
    text.append(f"padded {part.padding_side}" if part.padding_side else "")
    cells = (
        f"`{part.name}`",
        part.model,
        "yes" if part.mask else "no",
        rows,
        str(part.max_length),
        ", ".join(filter(None, text)),
        ", ".join(part.outputs),
    )
    return f"| {' | '.join(cells)} |"


def test_the_table_of_the_docs_is_that_of_the_file() -> None:
    found = (
        (ROOT / "docs" / "reference" / "cache-pipelines.md")
        .read_text(encoding="utf-8")
        .splitlines()
    )
    for line in table_lines():
        assert line in found, line
    for note in {part.note for part in table().parts} - {""}:
        assert any(note in line for line in found), note
