"""The table of pipelines: what it says is what the installed diffusers does; what `--for` makes."""

import inspect
import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import pytest
from denoisers import DENOISERS
from language_models import (
    CHATML,
    LONGEST,
    MISTRAL,
    ChatTokenizer,
    chat_tokenizer,
    language_model,
)
from pipeline_probe import (
    ALONE,
    CLIP_LENGTH,
    LAYERS,
    MADE_FOR_CHATS,
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
from transformers import PreTrainedTokenizerFast

from enginecast.cache.encoders.request import (
    EncoderRequest,
    Part,
    named_outputs,
    offer,
    part_of,
    resolve,
    table,
)
from enginecast.cache.encoders.tokenizer_files import find_tokenizer
from enginecast.cache.encoders.tokenizing import Tokenizing, digest_of
from enginecast.cache.store.spec import EncoderSpec, OutputSpec
from enginecast.capture.outputs.flatten import RAW, hidden_index
from enginecast.compiler.prepare.open_model import open_model
from enginecast.compiler.request import ExportRequest, ModelOptions
from enginecast.errors import UsageError
from enginecast.runtime.bundle.manifest import TextForm
from enginecast.runtime.prompts import open_tokenizer, tokenize

ROOT = Path(__file__).parents[2]
PIPELINES = list(dict.fromkeys(part.pipeline for part in table().parts))
PROMPTS = ["  A b\n c ", 'd e &amp;amp; f "g" h']
LENGTH_IN_SOURCE: Mapping[str, int | None] = {
    "latte:text_encoder": 120,
    "qwen-image:text_encoder": 1058,
    "hunyuan-video-15:text_encoder": 1108,
    "hunyuan-video-15:text_encoder_2": 256,
    "ernie-image:text_encoder": None,
    "qwen-image21:text_encoder": None,
}
"""Parts whose length is not an argument."""


def probe(pipeline: str, folder: Path, side: str = "right") -> tuple[list[Reading], list[Tensor]]:
    """What the pipeline reads of its encoders, and what it returns.

    Args:
        side: on which the files of the tokenizer say that it pads.
    """
    parts = parts_of(pipeline)
    recorders = [Recorder(number, part) for number, part in enumerate(parts, start=1)]
    tokenizer = tokenizer_for(pipeline, folder, side)
    pipe = build(
        pipeline,
        {recorder.part.part: recorder for recorder in recorders},
        {part.part: tokenizer for part in parts},
    )
    # `__call__` hands this on; the default of `encode_prompt` is 226.
    others = {"max_sequence_length": 512} if pipeline in ("wan", "wan22") else {}
    if pipeline in ALONE:
        returned = [one for text in PROMPTS for one in encode(pipe, [text])]
    else:
        returned = encode(pipe, PROMPTS, **others)
    return readings(recorders, returned), returned


def tokenizer_for(pipeline: str, folder: Path, side: str) -> PreTrainedTokenizerFast:
    if pipeline not in MADE_FOR_CHATS:
        return word_tokenizer(folder, CLIP_LENGTH, side)
    template = MISTRAL if pipeline in ("flux2", "ernie-image", "ltx2") else CHATML
    found: PreTrainedTokenizerFast = ChatTokenizer.from_pretrained(
        chat_tokenizer(folder, template, side)
    )
    return found


def kept(part: Part, ids: Tensor) -> set[int]:
    """Positions in a row of ids, which the table's tokenizers pad with 0."""
    tokens = [int(place) for place in ids.nonzero()]
    if part.keep_all:
        return set(range(part.skip_rows, len(ids)))
    more = range(tokens[-1] + 1, tokens[-1] + 1 + part.extra_rows)
    return {*(tokens[part.skip_rows :]), *more}


def from_behind(name: str) -> str:
    """The name of a hidden state, counted as the recorder counts them."""
    index, name = hidden_index(name), name.removeprefix(RAW)
    return name if index is None or index < 0 else f"hidden_states.{index - LAYERS}"


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_the_pipeline_reads_the_rows_that_the_table_keeps(pipeline: str, tmp_path: Path) -> None:
    found, _ = probe(pipeline, tmp_path)
    rows: dict[str, list[tuple[set[int], set[int]]]] = {}
    for reading in found:
        part = reading.part
        ids, mask, longest = reading.call.ids, reading.call.mask, part.max_length
        assert part.mask == (mask is not None or bool(ids.all())), part.name
        if ids.shape[1] != longest:
            assert not part.keep_all, part.name
            assert longest is None or ids.shape[1] < longest, part.name
            assert mask is None or mask.all(dim=1).any(), part.name
        outputs = {from_behind(name) for name in named_outputs(part.outputs, LAYERS - 1)}
        for read, row in zip(reading.rows, ids, strict=True):
            assert set(read) == outputs, part.name
            for name in set(read) - {"text_embeds", "pooler_output"}:
                rows.setdefault(part.name, []).append((read[name], kept(part, row)))
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
        tokenizer = (tmp_path / "tokenizer.json").read_bytes()
        spec = spec_for(part, tokenizer)
        calls = [reading.call for reading in found if reading.part == part]
        texts = [text for text in PROMPTS if part.clean != "quoted" or '"' in text]
        rows = [row for call in calls for row in call.ids][: len(texts)]
        for row, made in zip(rows, Tokenizing(tokenizer, spec).tokens(texts), strict=True):
            assert row[row != 0].tolist() == made.ids.tolist()
            if len(made.ids) < len(row) and not part.keep_end:
                assert not row[0 if (part.padding_side or "left") == "left" else -1]


@pytest.mark.parametrize("part", table().parts, ids=lambda part: part.name)
def test_an_engine_for_a_pipeline_makes_the_ids_that_a_fill_makes(
    part: Part, tmp_path: Path
) -> None:
    file = chat_tokenizer(tmp_path, MISTRAL) / "tokenizer.json"
    fields = {name: getattr(part, name) for name in TextForm.__struct_fields__}
    form, spec = TextForm(**fields), spec_for(part, file.read_bytes())
    texts = [*PROMPTS, "", "long " * 900]
    found = tokenize(open_tokenizer(file, spec.max_length, form=form), form, texts)
    wanted = Tokenizing(file.read_bytes(), spec).tokens(texts)
    assert [one.ids for one in found] == [one.ids.tolist() for one in wanted]
    assert [one.is_cut for one in found] == [one.length > spec.max_length for one in wanted]


@pytest.mark.parametrize(
    ("kind", "folder", "line"),
    [
        ("FluxPipeline", "text_encoder_2", "part of a FluxPipeline: --for flux:text_encoder_2 "),
        ("WanPipeline", "text_encoder", "part of a WanPipeline: --for wan:text_encoder "),
        ("FluxPipeline", "transformer", ""),
        ("FluxControlPipeline", "text_encoder", ""),
        (None, "text_encoder", ""),
    ],
)
def test_the_row_is_found_by_the_pipeline_around_a_folder(
    kind: str | None, folder: str, line: str, tmp_path: Path
) -> None:
    (tmp_path / folder).mkdir()
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": kind} if kind else []))
    model = str(tmp_path / folder)
    assert offer(model, "exports") == (line and f"{line}exports what it reads")
    assert ExportRequest(model).offer == offer(model, "exports")
    assert ExportRequest(model, options=ModelOptions(outputs=("a",))).offer == ""


@pytest.mark.parametrize(
    ("model", "options", "words"),
    [
        ("nowhere", {}, "--for ltx2: expected the folder of its text encoder, Gemma3ForCond"),
        ("text", {"kv_cache": True}, "--for does not go with --kv-cache"),
        ("text", {}, "--outputs hidden_states.0:: nobody knows how many hidden states"),
    ],
)
def test_an_export_for_a_pipeline_says_what_is_wrong(
    model: str, options: dict[str, Any], words: str, tmp_path: Path
) -> None:
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "config.json").write_text("{}")
    with pytest.raises(UsageError, match=re.escape(words)):
        ExportRequest(str(tmp_path / model), options=ModelOptions(for_pipeline="ltx2", **options))


@pytest.mark.parametrize("place", ["tokenizer_2", "processor"])
def test_the_tokenizer_of_a_pipeline_is_beside_its_encoder(place: str, tmp_path: Path) -> None:
    folder = language_model(tmp_path / "text_encoder_2", "qwen3", "Qwen3Model", 1)
    (tmp_path / place).mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).rename(tmp_path / place / name)
    request = ExportRequest(str(folder), options=ModelOptions(for_pipeline="krea2"))
    source = open_model(request.model, replace(request.options, outputs=()))
    found = source.encode(["a fox"], source.inputs())
    assert found is not None
    facts = find_tokenizer(folder)
    [wanted] = Tokenizing(facts.text, spec_for(part_of("krea2"), facts.text)).tokens(["a fox"])
    assert found["input_ids"].tolist() == [wanted.ids.tolist()]


def test_what_a_user_says_stays(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"text_config": {"num_hidden_layers": 2}}')
    made = ExportRequest(str(tmp_path), options=ModelOptions(for_pipeline="ltx2")).options
    assert made.outputs == tuple(f"hidden_states.{index}" for index in range(3))
    assert made.dynamic == ("input_ids:1=1..1024",)
    own = ModelOptions(for_pipeline="ltx2", outputs=("a",), dynamic=("input_ids:1=8",))
    kept = ExportRequest(str(tmp_path), options=own).options
    assert (kept.outputs, kept.dynamic) == (("a",), ("input_ids:1=8",))


def spec_for(part: Part, tokenizer: bytes) -> EncoderSpec:
    fields = ("template", "clean", "special_tokens", "keep_end", "mask")
    return EncoderSpec(
        model={},
        precision="fp32",
        tokenizer=digest_of(tokenizer),
        max_length=part.max_length or LONGEST,
        padding_id=0,
        rows="real",
        outputs=(OutputSpec(name="last_hidden_state", per="token", width=1, dtype="float32"),),
        **{name: getattr(part, name) for name in fields},
    )


@pytest.mark.parametrize("part", table().parts, ids=lambda part: part.name)
def test_the_source_is_there_and_the_length_is_its_default(part: Part) -> None:
    pipeline, _, function = part.function.partition(".")
    found = getattr(diffusers, pipeline)
    assert Path(inspect.getsourcefile(found) or "").as_posix().endswith(f"diffusers/{part.source}")
    assert callable(getattr(found, function))
    named = inspect.signature(found.__call__).parameters.get("max_sequence_length")
    if "CLIP" in part.model:
        assert part.max_length == CLIP_LENGTH
    elif part.name in LENGTH_IN_SOURCE:
        assert part.max_length == LENGTH_IN_SOURCE[part.name]
    else:
        assert named is not None
        assert part.max_length == named.default + part.skip_rows


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_every_mask_that_a_pipeline_returns_was_looked_into(pipeline: str, tmp_path: Path) -> None:
    _, returned = probe(pipeline, tmp_path)
    shapes = {one.shape[:2] for one in returned if one.ndim >= 3}
    masked = any(one.ndim == 2 and one.shape in shapes for one in returned)
    # Whose rows of padding are zeros, with the encoder and with a cache, needs no denoiser.
    assert masked == (pipeline in {*DENOISERS, "qwen-image21"})


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
        ("sdxl-turbo", "no such pipeline is known", "Known: allegro, auraflow, bria, chroma"),
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
    text.append("end kept" if part.keep_end else "")
    text.append("" if part.special_tokens else "no special tokens added")
    text.append(f"padded {part.padding_side}" if part.padding_side else "")
    cells = (
        f"`{part.name}`",
        part.model,
        "yes" if part.mask else "no",
        rows,
        str(part.max_length or "tokenizer's"),
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
