"""Engines of quantized programs in ONNX Runtime's CPU provider: they compute what the programs do.

An integer product is exact and a float one nearly so; what is left is values that meet another
rounding because the float before it differs in its last digit.  So the measure is what a scale
that is wrong by 1 % does, and an error has to be below a tenth of it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import models
import msgspec
import numpy as np
import onnxruntime
import pytest
import torch
from bundles import manifest
from family_text import clip_text
from family_vision import CLIP_VISION
from lowering import lower, profile_ops
from packaging.version import Version
from programs import TOKENS, Image, Text, captured, prompts, relative_error, rewritten, seeded
from quantized_programs import FP8, Form, in_torch, quantized
from torch import Tensor, nn
from torch.export import ExportedProgram
from transformers import (
    BertModel,
    CLIPTextModel,
    CLIPVisionConfig,
    CLIPVisionModel,
    T5EncoderModel,
    UMT5Config,
    UMT5EncoderModel,
    ViTModel,
)

from enginecast.compiler.engines.lower_and_run import unsealed
from enginecast.errors import BundleError
from enginecast.exporters.onnx.lower import GRAPH_FILE
from enginecast.exporters.target import Artifact
from enginecast.exporters.weights.file import WEIGHTS_FILE
from enginecast.runtime.bundle.manifest import EngineRecord, Input, Output
from enginecast.runtime.bundle.reader import Bundle
from enginecast.runtime.sessions.onnxruntime import (
    CPU_PROVIDER,
    OrtSession,
    create_session,
    options_for,
)

INT8 = torch.int8
FUSED = "canonicalize,fuse-rms-norm,fuse-attention,fuse-skip-norm"
UMT5 = UMT5Config(
    vocab_size=models.VOCABULARY, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4
)
MODELS: dict[str, tuple[Any, Any]] = {
    "t5": (T5EncoderModel, models.t5_config()),
    "umt5": (UMT5EncoderModel, UMT5),
    "bert": (BertModel, models.bert_config()),
    "clip-text": (CLIPTextModel, clip_text()),
    "vit": (ViTModel, models.vit_config()),
    "clip-vision": (CLIPVisionModel, CLIPVisionConfig(**CLIP_VISION)),
}


@dataclass(frozen=True)
class Case:
    program: ExportedProgram
    inputs: tuple[Tensor, ...]


_CASES: dict[str, Case] = {}


def case(name: str) -> Case:
    """A model after the fusions, and inputs for it."""
    if name not in _CASES:
        model_class, config = MODELS[name]
        model = seeded(model_class, config)
        torch.manual_seed(1)
        if hasattr(config, "image_size"):
            module: nn.Module = Image(model)
            inputs: tuple[Tensor, ...] = (torch.randn(2, 3, config.image_size, config.image_size),)
            dynamic = {0: TOKENS[0]}
        else:
            module, inputs, dynamic = Text(model), prompts(3, 9), TOKENS
        program = captured(module, *inputs, dynamic=dynamic)
        _CASES[name] = Case(rewritten(program, FUSED)[0], inputs)
    return _CASES[name]


Made = tuple[ExportedProgram, Artifact, Path]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Form, torch.dtype], Made]:
    """A model that is quantized and lowered, once."""

    @cache
    def make(name: str, form: Form, dtype: torch.dtype) -> Made:
        folder = tmp_path_factory.mktemp(name)
        program = quantized(case(name).program, form, dtype, largest=12.0)
        return program, lower(program, folder), folder

    return make


def run(
    folder: Path, inputs: tuple[Tensor, ...], options: onnxruntime.SessionOptions | None = None
) -> Tensor:
    options = options or options_for("fp32", CPU_PROVIDER, "int8")
    session = create_session(folder / GRAPH_FILE, [CPU_PROVIDER], 1, options)
    feeds = {i.name: x.numpy() for i, x in zip(session.get_inputs(), inputs, strict=True)}
    return torch.from_numpy(np.asarray(session.run(None, feeds)[0]))


FORMS: list[tuple[Form, torch.dtype]] = [
    ("row", INT8),
    ("tensor", INT8),
    ("static", INT8),
    ("storage", INT8),
    ("blocks", INT8),
    ("activation blocks", INT8),
    ("row", FP8),
    ("static", FP8),
    ("storage", FP8),
]
DEFAULT = {("t5", "row", INT8)}
ALL = [
    pytest.param(
        name, form, dtype, marks=() if (name, form, dtype) in DEFAULT else pytest.mark.slow
    )
    for name in MODELS
    for form, dtype in FORMS
]


@pytest.mark.parametrize(("name", "form", "dtype"), ALL)
def test_engines_compute_what_their_programs_compute(
    made: Callable[..., Made], name: str, form: Form, dtype: torch.dtype
) -> None:
    given = case(name)
    program, lowered, folder = made(name, form, dtype)
    expected = in_torch(program, *given.inputs)[0]
    wrong = quantized(given.program, form, dtype, largest=12.0, factor=1.01)
    harm = relative_error(in_torch(wrong, *given.inputs)[0], expected)
    assert harm > 5e-5
    found = run(folder, given.inputs, options_for("fp32", CPU_PROVIDER, lowered.quantized))
    assert relative_error(found, expected) < harm / 10
    # What ONNX Runtime rewrites at its default level changes no more.
    basic = options_for("fp32", CPU_PROVIDER, lowered.quantized)
    basic.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    assert relative_error(run(folder, given.inputs, basic), found) < harm / 10


class Pair(nn.Module):
    """Two linears without biases: ONNX Runtime rewrites what surrounds such a product."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(32, 64, bias=False)
        self.narrow = nn.Linear(64, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        narrow: Tensor = self.narrow(torch.relu(self.wide(x)))
        return narrow


@pytest.fixture(scope="module")
def pair() -> ExportedProgram:
    torch.manual_seed(0)
    return captured(Pair(), torch.randn(2, 7, 32), dynamic=TOKENS)


def bundle_of(folder: Path, quantized: Any) -> tuple[Bundle, EngineRecord]:
    """A bundle around an engine of `Pair`."""
    content = manifest()
    record = msgspec.structs.replace(content.engines[0], quantized=quantized, opset=23)
    shape = ("batch", "sequence", 32)
    content = msgspec.structs.replace(
        content,
        inputs=(Input(name="x", kind="tensor", dtype="float32", shape=shape),),
        outputs=(Output(name="out", dtype="float32", shape=shape),),
        engines=(record,),
    )
    return unsealed(folder, content, [GRAPH_FILE, WEIGHTS_FILE]), record


def test_fp8_engines_run_at_the_default_level(pair: ExportedProgram, tmp_path: Path) -> None:
    x = torch.randn(2, 5, 32)
    program = quantized(pair, "static", FP8)
    assert lower(program, tmp_path).quantized == "fp8"
    if Version(onnxruntime.__version__) < Version("1.32"):  # which takes them as they are
        bundle, record = bundle_of(tmp_path, "")
        with pytest.raises(BundleError, match="ONNX Runtime refuses it"):
            OrtSession.open(bundle, record, [CPU_PROVIDER], 1)
    bundle, record = bundle_of(tmp_path, "fp8")
    session = OrtSession.open(bundle, record, [CPU_PROVIDER], 1)
    found = session.to_host(session.run({"x": x.numpy()}, ["out"])["out"])
    expected = in_torch(program, x)[0]
    assert relative_error(torch.from_numpy(np.asarray(found)), expected) < 1e-6
    executed = profile_ops(tmp_path / GRAPH_FILE, {"x": x.numpy()}, threads=1, quantized="fp8")
    assert executed.count("DequantizeLinear") == 4
