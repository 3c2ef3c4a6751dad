"""The route to TensorRT by torch_tensorrt, with fakes in the places of both."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import fake_tensorrt
import fake_torch_tensorrt
import pytest
import torch
from fake_torch_tensorrt import PLAN, FakeTorchTensorRT, modules
from programs import TOKENS, captured, rewritten, targets
from quantized_programs import FP8, quantized
from torch import Tensor, nn
from torch.export import ExportedProgram

from enginecast.exporters.target import LoweringRequest
from enginecast.exporters.tensorrt import torch_build as tensorrt_torch
from enginecast.exporters.tensorrt.lower import lowering
from enginecast.exporters.tensorrt.options import TensorRTOptions
from enginecast.exporters.tensorrt.torch_build import plan_by_torch
from enginecast.runtime.bundle.manifest import ShapeRange

IDS = ShapeRange(name="ids", least=(1, 2), optimal=(4, 16), greatest=(8, 32))
TRT = "11.0.0.114+fake"


class Block(nn.Module):
    """An embedding, a norm, and two linears around a gelu."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 32)
        self.norm = nn.RMSNorm(32, eps=1e-6)
        self.wide = nn.Linear(32, 64)
        self.narrow = nn.Linear(64, 32, bias=False)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        x = self.table(ids)
        hidden = self.narrow(nn.functional.gelu(self.wide(self.norm(x))))
        return x + hidden, hidden


@cache
def block(dtype: torch.dtype = torch.float16) -> ExportedProgram:
    torch.manual_seed(0)
    ids = torch.randint(0, 50, (2, 7))
    return captured(Block().to(dtype), ids, dynamic=TOKENS)


def ordered(program: ExportedProgram, folder: Path) -> LoweringRequest:
    outputs = [f"result_{index}" for index in range(len(program.graph_signature.user_outputs))]
    ready, _ = rewritten(program, lowering("torch"))
    options = TensorRTOptions("torch")
    return LoweringRequest(ready, folder, outputs, device="cuda", options=options)


Build = Callable[..., bytes]


@pytest.fixture
def trt(monkeypatch: pytest.MonkeyPatch) -> Any:
    return fake_tensorrt.install(monkeypatch, TRT)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, trt: Any) -> FakeTorchTensorRT:
    return fake_torch_tensorrt.install(monkeypatch, trt)


@pytest.fixture
def build(fake: FakeTorchTensorRT, trt: Any, tmp_path: Path) -> Build:
    def made(program: ExportedProgram, profile: Any = (IDS,), **options: Any) -> bytes:
        order = replace(ordered(program, tmp_path), options=TensorRTOptions("torch", **options))
        return plan_by_torch(order, trt, profile, tmp_path / "cache")

    return made


def test_what_is_asked_for(build: Build, fake: FakeTorchTensorRT) -> None:
    program = block()
    before = targets(program)
    assert build(program).startswith(PLAN)
    assert targets(program) == before
    assert Path(fake.settings.pop("timing_cache_path")).name == "cache"
    assert fake.settings == {
        "attn_bias_is_causal": False,
        "cache_built_engines": False,
        "decompose_attention": False,
        "disable_tf32": True,
        "enable_experimental_decompositions": False,
        "hardware_compatible": False,
        "immutable_weights": True,
        "optimization_level": None,
        "require_full_compilation": True,
        "reuse_cached_engines": False,
        "truncate_double": False,
        "use_fp32_acc": False,
        "version_compatible": False,
        "workspace_size": 0,
    }
    assert [one.settings for one in fake.inputs] == [
        {
            "min_shape": (1, 2),
            "opt_shape": (4, 16),
            "max_shape": (8, 32),
            "dtype": torch.int64,
            "name": "ids",
        }
    ]


@pytest.mark.parametrize(
    ("option", "setting"),
    [
        ({"refit": True}, {"immutable_weights": False}),
        ({"hardware": "ampere+"}, {"hardware_compatible": True}),
        ({"version_compatible": True}, {"version_compatible": True}),
        ({"level": 5}, {"optimization_level": 5}),
        ({"level": 0}, {"optimization_level": 0}),
        ({"workspace": 1 << 30}, {"workspace_size": 1 << 30}),
    ],
)
def test_each_option_has_its_setting(
    option: dict[str, Any], setting: dict[str, Any], tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    usual = tensorrt_torch.settings_for("2.13.0", TensorRTOptions(), cache)
    found = tensorrt_torch.settings_for("2.13.0", TensorRTOptions(**option), cache)
    assert {name: value for name, value in found.items() if value != usual[name]} == setting


@pytest.mark.parametrize("version", ["2.11.0+fake", "2.12.0+fake", "2.13.0+fake"])
def test_each_version_knows_its_settings(trt: Any, version: str, tmp_path: Path) -> None:
    dynamo = ModuleType("dynamo")
    vars(dynamo).update(modules(FakeTorchTensorRT(version, trt))["torch_tensorrt.dynamo"])
    settings = tensorrt_torch.settings_for(version, TensorRTOptions(), tmp_path)
    tensorrt_torch.check_settings(dynamo, version, settings)
    assert settings.get("use_explicit_typing") is (None if "2.13" in version else True)
    assert "enabled_precisions" not in settings  # the default alone goes with it


def test_fp8_products(build: Build, fake: FakeTorchTensorRT, trt: Any) -> None:
    build(quantized(block(), "static", FP8))
    assert len(fake.layers("add_quantize")) == 2
    assert len(fake.layers("add_matrix_multiply")) == 2
    weights = [one for one in fake.layers("add_dequantize") if one.axis is not None]
    assert len(weights) == 3, "two linears and the table"
    for layer in weights:
        values = fake.value(layer._arguments["input"])
        scale = fake.value(layer._arguments["scale"])
        assert values.dtype == FP8
        assert scale.dtype == torch.float32
        assert scale.shape == (values.shape[layer.axis],)
        assert layer._arguments["output_type"] == trt.DataType.FLOAT  # fp16 rounds these scales
    assert {fake.value(one).dtype for one in _read(fake)} == {FP8, torch.float32, torch.float16}


def _read(fake: FakeTorchTensorRT) -> list[Any]:
    """Every constant that a layer reads."""
    given = [one for layer in fake.network._layers for one in layer._arguments.values()]
    return [one for one in given if id(one) in fake.constants]
