"""The emulator on programs: what it finds and where, and that onnx.reference finds the same."""

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from lowering import lower
from lowering import run as run_engine
from models import OUTLIER_CHANNELS, perturb, t5_config
from onnx.reference import ReferenceEvaluator
from programs import captured, rewritten
from torch import Tensor, nn
from torch.export import ExportedProgram
from transformers import T5EncoderModel

import enginecast.ops  # noqa: F401 - registers our ops
from enginecast.passes.ir.interpret import interpret
from enginecast.passes.ir.source import module_path
from enginecast.passes.presets import preset
from enginecast.verification.emulate.data import Emulation
from enginecast.verification.emulate.profiles import get_profile
from enginecast.verification.emulate.run import emulate

WITHOUT_SKIP = "unify-dtype{to=fp16},canonicalize,fuse-gelu,fuse-rms-norm,fuse-attention"
HIDDEN_UNIT, TRIGGER = 7, 9
EOS = 1


class Wrapped(nn.Module):
    """A T5 encoder with one output."""

    def __init__(self, peak: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.model = T5EncoderModel(t5_config()).eval().requires_grad_(False)
        perturb(self.model)
        if peak:
            plant(self.model, peak)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        found: Tensor = self.model(input_ids, attention_mask=attention_mask).last_hidden_state
        return found


def plant(model: nn.Module, peak: float) -> None:
    """Let one hidden unit of block 1 fire on the end-of-text token and write `peak` or so to two
    channels of the stream, as trained T5 does (huggingface/transformers#10956)."""
    state = dict(model.named_parameters())
    embedding = state["shared.weight"]
    embedding[:, TRIGGER] = 0.0
    embedding[EOS, TRIGGER] = 40.0
    block = "encoder.block.1.layer.1."
    state[block + "layer_norm.weight"][TRIGGER] = 1.0
    for name in ("wi_0", "wi_1"):
        state[f"{block}DenseReluDense.{name}.weight"][HIDDEN_UNIT, TRIGGER] = 8.0
    for channel in OUTLIER_CHANNELS:
        state[f"{block}DenseReluDense.wo.weight"][channel, HIDDEN_UNIT] = peak / 1500


def text() -> tuple[Tensor, Tensor]:
    ids = torch.randint(2, 96, (3, 11))
    mask = (torch.arange(11)[None] < torch.tensor([[11], [6], [2]])).long()
    return ids.masked_fill(torch.arange(11)[None] == mask.sum(1, keepdim=True) - 1, EOS), mask


@functools.cache
def captured_t5(peak: float) -> tuple[Wrapped, ExportedProgram]:
    module = Wrapped(peak)
    return module, captured(module, *text())


NAIVE = preset("fp16").removeprefix("rescale-streams,")
"""A mere conversion, whose stream stays as large as it is."""


def t5(peak: float = 0.0, pipeline: str = NAIVE) -> tuple[nn.Module, ExportedProgram]:
    module, program = captured_t5(peak)
    return module, rewritten(program, pipeline)[0]


def run(program: ExportedProgram, profile: str, *given: Tensor) -> tuple[Tensor, Emulation]:
    inputs = dict(zip(map(str, program.graph_signature.user_inputs), given, strict=True))
    mask = inputs.get("attention_mask")
    [found], reported = emulate(program, {"one": inputs}, get_profile(profile), masks=[mask])
    return found["output_0"], reported


def relative(found: Tensor, wanted: Tensor, mask: Tensor) -> float:
    found, wanted = found.double()[mask != 0], wanted.double()[mask != 0]
    return float((found - wanted).norm() / wanted.norm())


def reference(folder: Path, *given: Tensor) -> Tensor:
    """onnx.reference: numpy halves, op by op."""
    model = onnx.load(folder / "engine.onnx")
    session: Any = ReferenceEvaluator(model)
    feeds = {i.name: x.numpy() for i, x in zip(model.graph.input, given, strict=True)}
    with np.errstate(all="ignore"):
        [found] = session.run(None, feeds)
    return torch.from_numpy(np.asarray(found))


def test_it_rounds_as_onnx_reference_does(tmp_path: Path) -> None:
    module, program = t5(pipeline=WITHOUT_SKIP)
    ids, mask = text()
    exact = copy.deepcopy(module).double()(ids, mask)
    lower(program, tmp_path / "engine")
    wanted = reference(tmp_path / "engine", ids, mask)
    assert wanted.dtype is torch.float16
    found, reported = run(program, "torch-cpu", ids, mask)
    theirs, ours = relative(wanted, exact, mask), relative(found, exact, mask)
    assert 2e-4 < theirs < 1e-2
    assert 0.4 < ours / theirs < 1.25  # its norms round their steps, and ours once
    assert relative(found, wanted, mask) < 1.6 * theirs  # sqrt(2) for errors that are independent
    assert reported.overflow is None


OPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "matmul": lambda x, y: x @ y.mT,
    "mul": lambda x, y: x * y,
}


@pytest.mark.parametrize("name", OPS)
def test_single_ops_are_those_of_onnx_reference(tmp_path: Path, name: str) -> None:
    class Op(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            found: Tensor = OPS[name](x, y)
            return found

    x, y = (torch.randn(8, 64).mul(2).half() for _ in range(2))
    program = captured(Op(), x, y)
    lower(program, tmp_path / "engine")
    wanted = reference(tmp_path / "engine", x, y)
    found, _ = run(program, "torch-cpu", x, y)
    assert (found == wanted).float().mean() > 0.97


def test_what_passes_on_the_cpu_provider_and_overflows_in_real_halves_is_found(
    tmp_path: Path,
) -> None:
    module, program = t5(peak=1.4e5, pipeline="unify-dtype{to=fp16},canonicalize")
    ids, mask = text()
    lower(program, tmp_path / "engine")
    passed = run_engine(tmp_path / "engine", ids, mask)[0]
    assert relative(passed, module(ids, mask), mask) < 5e-3
    assert not reference(tmp_path / "engine", ids, mask)[mask != 0].isfinite().all()
    for profile in ("ort-cuda", "tensorrt", "torch-cpu"):
        found, reported = run(program, profile, ids, mask)
        assert not found[mask != 0].isfinite().all()
        assert reported.overflow is not None
        assert "encoder.block.1.layer.1.DenseReluDense" in reported.overflow.module


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_a_sound_program_has_headroom_and_no_false_alarm(precision: str) -> None:
    module, program = t5(peak=1e3, pipeline=preset(precision).removeprefix("rescale-streams,"))
    ids, mask = text()  # with padding: the fill values of its mask are not a lack of headroom
    found, reported = run(program, "ort-cuda", ids, mask)
    assert reported.overflow is None
    assert relative(found, module(ids, mask), mask) < (5e-3 if precision == "fp16" else 4e-2)
    rows = {place.module: place for place in reported.modules}
    wo = rows["model.encoder.block.1.layer.1.DenseReluDense.wo"]
    assert wo.headroom_bits is not None
    assert 2 < wo.headroom_bits < 9 if precision == "fp16" else wo.headroom_bits > 100
    assert all(p.headroom_bits is None or p.headroom_bits > 1 for p in reported.modules)
    for place in reported.modules:
        assert place.sqnr_db is None or 20 < place.sqnr_db < 120
    assert wo.max_abs == pytest.approx(largest(program, ids, mask, wo.module), rel=1e-2)


def largest(program: ExportedProgram, ids: Tensor, mask: Tensor, module: str) -> float:
    found = [0.0]

    def watch(_: int, node: Any, tensor: Tensor) -> None:
        if module_path(node) == module and tensor.is_floating_point():
            found.append(float(tensor.abs().max()))

    interpret(program, {"input_ids": ids, "attention_mask": mask}, watch=watch)
    return max(found)
