"""How many fusions a model should have, how many there are, and what is said of those missing."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from lowering import lower, profile_ops
from programs import TOKENS, Function, Image, Text, calibrated, captured, prompts, seeded
from torch.export import ExportedProgram
from transformers import BertModel, LlamaModel, T5EncoderModel, ViTModel

from enginecast.compiler.engines.fusion_contract import (
    ATTENTION,
    RMS_NORM,
    SKIP_NORM,
    count_fusions,
    expect_fusions,
)
from enginecast.exporters.onnx.lower import GRAPH_FILE
from enginecast.passes.ir.base import Site, SiteKey
from enginecast.passes.ir.edit import structural_copy
from enginecast.passes.ir.pipeline import run_pipeline
from enginecast.passes.presets import preset
from enginecast.passes.registry import build
from enginecast.runtime.bundle.manifest import Fusion

LAYERS = 3
EXPECTED = {
    "t5": (2 * LAYERS + 1, 2 * LAYERS, LAYERS),
    "bert": (0, 0, LAYERS),
}
"""Norms, norms of a residual sum, attentions."""


def capture(name: str) -> ExportedProgram:
    if name == "vit":
        module = Image(seeded(ViTModel, models.vit_config(layers=LAYERS)))
        return captured(module, torch.randn(3, 3, 16, 16), dynamic={0: TOKENS[0]})
    make: Any = {
        "t5": lambda: seeded(T5EncoderModel, models.t5_config(layers=LAYERS)),
        "llama": lambda: seeded(LlamaModel, models.llama_config(layers=LAYERS)),
        "bert": lambda: seeded(BertModel, models.bert_config(layers=LAYERS)),
    }
    return captured(Text(make[name]()), *prompts(3, 7), dynamic=TOKENS)


@pytest.fixture(scope="module")
def programs() -> dict[str, ExportedProgram]:
    return {name: capture(name) for name in EXPECTED}


Sites = dict[str, list[Site]]


def passed(
    program: ExportedProgram, pipeline: str, skip: frozenset[SiteKey] = frozenset()
) -> tuple[ExportedProgram, Sites]:
    copy = structural_copy(program)
    sites: Sites = {}
    for run in run_pipeline(build(pipeline), copy, calibrated(program, skip=skip)):
        sites.setdefault(run.pass_.name, []).extend(run.sites)
    return copy, sites


def by_kind(fusions: Sequence[Fusion]) -> dict[str, Fusion]:
    return {fusion.kind: fusion for fusion in fusions}


def engine_ops(program: ExportedProgram) -> dict[str, int]:
    """The counts of an engine that keeps every fusion of the program."""
    ops = torch.ops.enginecast
    targets = [node.target for node in program.graph.nodes]
    return {
        "com.microsoft::SkipSimplifiedLayerNormalization": targets.count(ops.skip_rms_norm.default),
        "RMSNormalization": targets.count(torch.ops.aten.rms_norm.default),
        "com.microsoft::MultiHeadAttention": targets.count(ops.attention.default),
        "MatMul": 7,
    }


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("name", EXPECTED)
def test_presets_fuse_every_site(
    programs: dict[str, ExportedProgram], name: str, precision: str
) -> None:
    program, sites = passed(programs[name], preset(precision))
    ops = engine_ops(program)
    fusions = count_fusions(expect_fusions(programs[name]), program, ops, None, sites)
    wanted = {
        kind: number
        for kind, number in zip((RMS_NORM, SKIP_NORM, ATTENTION), EXPECTED[name], strict=True)
        if number
    }
    assert {f.kind: f.expected for f in fusions} == wanted
    assert {f.kind: f.program for f in fusions} == wanted
    assert {f.kind: f.engine for f in fusions} == wanted
    assert all(f.runtime is None and f.missing == () for f in fusions)


def test_skipped_site_is_named_with_module_line_and_reason(
    programs: dict[str, ExportedProgram],
) -> None:
    _, sites = passed(programs["t5"], "canonicalize,fuse-rms-norm,fuse-attention")
    chosen = next(s for s in sites["fuse-attention"] if "block.1." in s.module)
    program, sites = passed(programs["t5"], preset("fp32"), frozenset({chosen.key}))
    expected = expect_fusions(programs["t5"])
    found = by_kind(count_fusions(expected, program, engine_ops(program), None, sites))
    assert found[ATTENTION].program == LAYERS - 1
    assert found[ATTENTION].missing == (f"{chosen.module} {chosen.source}: left alone on request",)
    assert "block.1.layer.0.SelfAttention" in chosen.module
    assert chosen.source.startswith("modeling_t5.py:")
    assert found[RMS_NORM].missing == found[SKIP_NORM].missing == ()


def test_refused_site_gives_the_pass_s_reason() -> None:
    def attend(q: torch.Tensor, mask: torch.Tensor) -> Any:
        scores = (q @ q.transpose(-1, -2)) * mask
        weights = scores.softmax(-1)
        return weights @ q, weights

    x = torch.randn(2, 4, 5, 8)
    program = captured(Function(attend), x, torch.ones(2, 4, 5, 5))
    after, sites = passed(program, "canonicalize,fuse-attention")
    (found,) = count_fusions(expect_fusions(program), after, engine_ops(after), None, sites)
    assert (found.kind, found.expected, found.program) == (ATTENTION, 1, 0)
    (reason,) = found.missing
    (site,) = sites["fuse-attention"]
    assert reason == f"{site.source}: {site.reason}"
    assert "softmax" in site.reason


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_runtime_executes_what_the_engine_holds(
    programs: dict[str, ExportedProgram], tmp_path: Path, device: str
) -> None:
    program, sites = passed(programs["t5"], preset("fp32", device=device))
    lowered = lower(program, tmp_path, device=device)
    ids, mask = prompts(2, 5)
    executed = profile_ops(tmp_path / GRAPH_FILE, {"ids": ids.numpy(), "mask": mask.numpy()})
    fusions = count_fusions(
        expect_fusions(programs["t5"]),
        program,
        lowered.ops,
        executed,
        sites,
    )
    assert {f.kind: f.runtime for f in fusions} == dict(
        zip((RMS_NORM, SKIP_NORM, ATTENTION), EXPECTED["t5"], strict=True)
    )
    assert all(fusion.missing == () for fusion in fusions)
