"""The census: every weight and value by dtype and module, and where float dtypes meet."""

from collections import Counter
from pathlib import Path

import models
import pytest
import torch
from programs import TOKENS, Image, Text, captured, prompts, rewritten, seeded
from torch import Tensor, nn
from torch.export import ExportedProgram
from transformers import T5EncoderModel, ViTModel

from enginecast.compiler.inspection.dtypes import dtypes_of, kept_modules, source_clamps
from enginecast.passes.captured.bind_weights import BindWeights
from enginecast.passes.ir.base import PassContext
from enginecast.passes.ir.edit import value, weight_specs
from enginecast.passes.ir.pipeline import run_pipeline
from enginecast.passes.precision.cast_borders import unexplained_casts
from enginecast.passes.precision.census import CAPTURE, MODEL, PASS, Meeting, take_census

BLOCK = "model.encoder.block.{}.layer.1.DenseReluDense.wo"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.tiny_t5(tmp_path_factory.mktemp("t5"))


def capture_t5(folder: Path, dtype: torch.dtype) -> ExportedProgram:
    model = T5EncoderModel.from_pretrained(folder, dtype=dtype).eval().requires_grad_(False)
    return captured(Text(model), *prompts(3, 7), dynamic=TOKENS)


@pytest.fixture(scope="module")
def mixed(folder: Path) -> ExportedProgram:
    return capture_t5(folder, torch.float16)


@pytest.fixture(scope="module")
def plain(folder: Path) -> ExportedProgram:
    return capture_t5(folder, torch.float32)


def at(meetings: tuple[Meeting, ...], what: str) -> list[Meeting]:
    return [meeting for meeting in meetings if meeting.what == what]


def test_every_weight_and_value_is_counted_once(mixed: ExportedProgram) -> None:
    census = take_census(mixed)
    counts = Counter[str]()
    for held in census.held:
        counts[held.kind] += held.count
    values = [n for n in mixed.graph.nodes if isinstance(value(n), Tensor)]
    assert counts["parameter"] == len(weight_specs(mixed)) == 22
    assert counts["edge"] == len(values) - 22
    wide = {h.module: h.elements for h in census.held if h.kind == "parameter" and h.dtype == "f32"}
    assert wide == {BLOCK.format(0): 32 * 64, BLOCK.format(1): 32 * 64}


def test_casts_of_the_models_code_are_named_with_their_lines(mixed: ExportedProgram) -> None:
    meetings = take_census(mixed).meetings
    (before_wo,) = [m for m in at(meetings, "cast f16 -> f32") if BLOCK.format(0)[:-3] in m.modules]
    assert (before_wo.by, before_wo.count) == (MODEL, 2)
    assert before_wo.source.startswith("modeling_t5.py:")
    assert before_wo.modules == (BLOCK.format(0)[:-3], BLOCK.format(1)[:-3])
    sums = at(meetings, "add.Tensor reads f16 and f32")
    assert sum(meeting.count for meeting in sums) == 2, "the residual: once fp16 + fp32, then back"
    assert {meeting.by for meeting in meetings} == {MODEL}


def test_casts_of_an_fp32_capture_say_where_the_source_wants_fp32(plain: ExportedProgram) -> None:
    (norms,) = take_census(plain).meetings
    assert (norms.what, norms.by, norms.count) == ("cast to f32 of what is f32", MODEL, 5)


def test_cast_of_a_stored_weight_is_not_the_models(folder: Path, plain: ExportedProgram) -> None:
    program = capture_t5(folder, torch.float32)
    weights = {n: t.bfloat16() for n, t in program.state_dict.items()}
    run_pipeline([BindWeights()], program, PassContext(weights=weights))
    census = take_census(program)
    (bound,) = at(census.meetings, "cast bf16 -> f32")
    assert (bound.by, bound.source) == (CAPTURE, "")
    assert BLOCK.format(1) in bound.modules
    assert {h.dtype for h in census.held if h.kind == "parameter"} == {"bf16"}


def test_casts_of_a_pass_are_distinguished(plain: ExportedProgram) -> None:
    after, _ = rewritten(plain, "unify-dtype{to=fp16}")
    meetings = take_census(after).meetings
    assert {meeting.by for meeting in meetings} == {PASS}
    assert unexplained_casts(after) == []
    assert all(meeting.what.startswith("cast ") for meeting in meetings), "no op reads two dtypes"


def test_clamps_are_found_where_they_were_baked_in(
    mixed: ExportedProgram, plain: ExportedProgram
) -> None:
    (clamp,) = take_census(mixed).clamps
    assert clamp.module == "model.encoder.block.0"
    (note,) = [note for note in dtypes_of(mixed, None).notes if "inf-clamps" in note]
    assert note.startswith(f"1 inf-clamps at {clamp.source} were baked in")
    assert take_census(plain).clamps == ()


def test_clamps_that_only_fp16_has_are_read_from_the_source(plain: ExportedProgram) -> None:
    (found,) = source_clamps(plain)
    assert (found.owner, found.modules) == ("T5Block", 2)
    lines = {int(source.partition(":")[2]) for source in found.sources}
    for line in lines:
        assert "float16" in source_text(line)
    assert dtypes_of(plain, None).source_clamps == (found,)
    vit = captured(Image(seeded(ViTModel, models.vit_config())), torch.randn(3, 3, 16, 16))
    assert source_clamps(vit) == ()


def source_text(line: int) -> str:
    import transformers.models.t5.modeling_t5 as module

    assert module.__file__ is not None
    return Path(module.__file__).read_text(encoding="utf-8").splitlines()[line - 1]


def test_what_a_class_keeps_in_fp32_is_named(mixed: ExportedProgram) -> None:
    (kept,) = kept_modules(take_census(mixed), T5EncoderModel)
    assert kept.attribute == "T5EncoderModel._keep_in_fp32_modules"
    assert (kept.pattern, kept.dtypes) == ("wo", ("f32",))
    assert kept.modules == (BLOCK.format(0), BLOCK.format(1))

    class Strict(nn.Module):
        _keep_in_fp32_modules_strict = ("SelfAttention.q", "nowhere")

    (strict,) = kept_modules(take_census(mixed), Strict)
    assert strict.attribute == "Strict._keep_in_fp32_modules_strict"
    assert strict.dtypes == ("f16",)
    notes = dtypes_of(mixed, Strict).notes
    assert any("when it loads float16 or bfloat16; stored here as f16" in note for note in notes)
    (odd,) = [note for note in notes if "no attribute of the class says why" in note]
    assert odd.startswith("2 modules store f32 where most weights are f16")
    assert not any("says why" in note for note in dtypes_of(mixed, T5EncoderModel).notes)
