"""The census: every weight and value by dtype and module, and where float dtypes meet."""

from collections import Counter
from pathlib import Path

import models
import pytest
import torch
from programs import TOKENS, Function, Text, captured, prompts
from torch import Tensor
from torch.export import ExportedProgram
from transformers import T5EncoderModel

from enginecast.passes.captured.bind_weights import BindWeights
from enginecast.passes.ir.base import PassContext
from enginecast.passes.ir.edit import value, weight_specs
from enginecast.passes.ir.pipeline import run_pipeline
from enginecast.passes.precision.census import CAPTURE, MODEL, Meeting, cast_fates, take_census

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


def mixes(x: Tensor) -> Tensor:
    scores = x @ x.transpose(-1, -2)
    weights = scores.float().softmax(-1).to(x.dtype)
    angles = torch.arange(x.shape[-1]).float()
    return (weights @ x).float() + x * angles.cos().to(x.dtype)


@pytest.mark.parametrize(
    ("low", "becomes"),
    [
        (
            "f16",
            [
                "stays: read in f32 by softmax.int",
                "stays: what is computed in f32 becomes f16",
                "dropped: read in f16 by add.Tensor",
                "stays: f32, computed from integers",
            ],
        ),
        ("f32", ["dropped: f32 throughout"]),
    ],
)
def test_what_becomes_of_a_cast_is_told(low: str, becomes: list[str]) -> None:
    program = captured(Function(mixes), torch.randn(2, 4, 8))
    meetings = take_census(program, cast_fates(program, set(), low)).meetings
    assert [meeting.becomes for meeting in meetings] == becomes


@pytest.mark.slow
def test_cast_of_a_stored_weight_is_not_the_models(folder: Path, plain: ExportedProgram) -> None:
    program = capture_t5(folder, torch.float32)
    weights = {n: t.bfloat16() for n, t in program.state_dict.items()}
    run_pipeline([BindWeights()], program, PassContext(weights=weights))
    census = take_census(program)
    (bound,) = at(census.meetings, "cast bf16 -> f32")
    assert (bound.by, bound.source) == (CAPTURE, "")
    assert BLOCK.format(1) in bound.modules
    assert {h.dtype for h in census.held if h.kind == "parameter"} == {"bf16"}
