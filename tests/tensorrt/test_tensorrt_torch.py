"""The route by torch_tensorrt, which cannot be imported without a GPU: our part of it.

Our converters add their layers to a real network of TensorRT-RTX, which infers dtypes and shapes
and builds it.
"""

from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import rtx
import torch
from programs import rewritten
from quantized_programs import FP8, Form, quantized
from rtx import trt
from torch import Tensor

from enginecast.errors import LoweringError, MissingError, UsageError
from enginecast.exporters.tensorrt.build import Job
from enginecast.exporters.tensorrt.lower import _by_torch, lowering
from enginecast.exporters.tensorrt.options import TensorRTOptions, parse_profiles
from enginecast.exporters.tensorrt.torch_build import (
    check_program,
    plan_by_torch,
    settings_for,
)
from enginecast.exporters.tensorrt.torch_converters import CONVERTERS, Layers
from enginecast.passes.ir.effects import aten, own

DTYPES = rtx.FLOATS | {torch.int64: trt.int64, FP8: trt.fp8}


class Network:
    """A real network, and a converter of ours for each op."""

    def __init__(self) -> None:
        self.builder, self.net = rtx.network()
        self._kept: list[Tensor] = []

    def feed(self, name: str, dtype: torch.dtype, *shape: int) -> Any:
        return self.net.add_input(name, DTYPES[dtype], shape)

    def constant(self, ctx: Any, value: Tensor, name: str) -> Any:
        self._kept.append(value.contiguous())
        weights = trt.Weights(DTYPES[value.dtype], self._kept[-1].data_ptr(), value.numel())
        return ctx.net.add_constant(tuple(value.shape), weights).get_output(0)

    def convert(self, op: Any, *args: Any) -> Any:
        layers = Layers(trt, SimpleNamespace(net=self.net), self.constant)
        return CONVERTERS[op](layers, "layer", *args)

    def layers(self, kind: str) -> list[Any]:
        found = map(self.net.get_layer, range(self.net.num_layers))
        return [layer for layer in found if layer.type.name == kind]

    def builds(self, found: Any) -> bool:
        self.net.mark_output(found)
        plan = self.builder.build_serialized_network(self.net, self.builder.create_builder_config())
        return plan is not None


@pytest.mark.parametrize("rank", [2, 3, 4])
@pytest.mark.parametrize(("exact", "casts"), [(True, 0), (False, 3)])
def test_a_linear(rank: int, exact: bool, casts: int) -> None:
    """Of which fp16 holds every scale, or not even the smallest."""
    network, shape = Network(), [3, 2, 4, 32][4 - rank :]
    x_scale = torch.tensor(2.0**-6 if exact else 0.01)
    scale = torch.full((16, 1), 0.5 if exact else 1e-9)
    weight, bias = torch.randn(16, 32).to(FP8), torch.randn(16).half()
    read = network.convert(
        own.quantize.default, network.feed("x", torch.float16, *shape), x_scale, FP8
    )
    assert read.dtype == trt.fp8
    args = (weight, scale, bias, torch.float16)
    found = network.convert(own.quantized_linear.default, read, x_scale, *args)
    assert (found.dtype, tuple(found.shape)) == (trt.float16, (*shape[:-1], 16))
    kinds = ("QUANTIZE", "DEQUANTIZE", "CAST", "MATRIX_MULTIPLY")
    assert [len(network.layers(kind)) for kind in kinds] == [1, 2, casts, 1]
    assert network.builds(found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_norm_is_computed_in_fp32(dtype: torch.dtype) -> None:
    network = Network()
    x, weight = network.feed("x", dtype, 2, 5, 24), torch.ones(24, dtype=dtype)
    found = network.convert(own.whole_rms_norm.default, x, 1, weight, 1e-6)
    assert (found.dtype, tuple(found.shape)) == (DTYPES[dtype], (2, 5, 24))
    (mean,) = [layer.get_output(0) for layer in network.layers("REDUCE")]
    assert (mean.dtype, tuple(mean.shape)) == (trt.float32, (2, 5, 1))
    assert len(network.layers("CAST")) == (0 if dtype == torch.float32 else 2)
    assert network.builds(found)


def test_a_gather() -> None:
    network = Network()
    x, indices = network.feed("x", torch.float32, 2, 5), torch.zeros(2, 3, dtype=torch.int64)
    found = network.convert(aten.gather.default, x, -1, indices)
    assert tuple(found.shape) == (2, 3)
    assert network.builds(found)


@pytest.mark.parametrize(
    ("form", "dtype", "said"),
    [
        ("static", torch.int8, "expected fp8 e4m3fn, got int8"),
        ("storage", torch.float8_e5m2, "expected fp8 e4m3fn, got float8_e5m2"),
        ("row", FP8, "got scales that are computed while it runs"),
        ("blocks", torch.int8, "scales of blocks"),
    ],
)
def test_what_has_no_layers_is_named(form: Form, dtype: torch.dtype, said: str) -> None:
    program = rtx.program(torch.float16)[1]
    ready, _ = rewritten(quantized(program, form, dtype, kinds=("linear",)), lowering("torch"))
    with pytest.raises(LoweringError) as caught:
        check_program(ready)
    assert said in caught.value.message
    assert "rtx.py:" in caught.value.message
    fine, _ = rewritten(quantized(program, "static", FP8), lowering("torch"))
    check_program(fine)


@pytest.mark.parametrize(
    ("option", "setting"),
    [
        ({}, {}),
        ({"refit": True}, {"immutable_weights": False}),
        ({"hardware": "ampere+"}, {"hardware_compatible": True}),
        ({"version_compatible": True}, {"version_compatible": True}),
        ({"level": 0}, {"optimization_level": 0}),
        ({"workspace": 1 << 30}, {"workspace_size": 1 << 30}),
    ],
)
def test_each_option_has_its_setting(
    option: dict[str, Any], setting: dict[str, Any], tmp_path: Path
) -> None:
    usual = settings_for("2.13.0", TensorRTOptions(), tmp_path)
    assert usual["disable_tf32"]
    assert usual["require_full_compilation"]
    found = settings_for("2.13.0", TensorRTOptions(**option), tmp_path)
    assert {name: value for name, value in found.items() if value != usual[name]} == setting
    for version in ("2.11.0", "2.12.0"):
        older = settings_for(version, TensorRTOptions(**option), tmp_path)
        assert older == found | {"use_explicit_typing": True}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"strip_weights": True}, "weights stay in the plan"),
        ({"hardware": "same-capability"}, "got 'same-capability'"),
    ],
)
def test_options_without_a_setting(options: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=said):
        settings_for("2.13.0", TensorRTOptions(route="torch", **options), tmp_path)


def test_what_this_route_cannot_do_is_said_before_the_build(tmp_path: Path) -> None:
    profiles = parse_profiles(["x=1x2x16,1x2x16,1x2x16", "x=2x2x16,2x2x16,2x2x16"])
    order = rtx.order(tmp_path, TensorRTOptions(route="torch", profiles=profiles))
    with pytest.raises(UsageError, match=r"--profile: .*route=torch builds one profile, got 2"):
        _by_torch(Job(trt, order, (), {}))
    if find_spec("torch_tensorrt"):
        pytest.skip("torch_tensorrt is here")
    with pytest.raises(MissingError, match="needs torch_tensorrt, which is not installed") as found:
        plan_by_torch(order, trt, (), tmp_path)
    assert found.value.exit_code == 3
