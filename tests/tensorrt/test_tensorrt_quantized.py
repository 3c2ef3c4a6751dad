"""Quantized values in TensorRT's form of ONNX: what they are said in, what it computes, what is
refused, and that TensorRT-RTX builds it."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from programs import TOKENS, calibrated, captured, relative_error, rewritten
from quantized_programs import FP8, Form, in_torch, quantized
from safetensors import safe_open
from tensorrt_networks import network_of, nodes_in, op_count, order_of, run_network
from torch import Tensor, nn
from torch.export import ExportedProgram

import enginecast.ops  # noqa: F401 - registers our ops
from enginecast.errors import LoweringError
from enginecast.exporters.onnx.fp32_twin import open_twin
from enginecast.exporters.registry import target_of
from enginecast.exporters.tensorrt.lower import (
    NETWORK_FILE,
    NETWORK_WEIGHTS_FILE,
    quantized_format,
    tensorrt_onnx,
)
from enginecast.exporters.tensorrt.options import TensorRTRTXOptions
from enginecast.ops.quantize import E2M1
from enginecast.passes.ir.edit import structural_copy
from enginecast.passes.ir.quantization_plan import plan_of
from enginecast.passes.quantize.measure.simulate import fake_weight, grid_of
from enginecast.runtime.values.arrays import from_ort

ours = torch.ops.enginecast
INT4, FLOAT4 = onnx.TensorProto.INT4, onnx.TensorProto.FLOAT4E2M1
Q, DQ = "QuantizeLinear", "DequantizeLinear"


class Mixed(nn.Module):
    """An embedding, a convolution over its tokens, and two linears that share an input."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(96, 32)
        self.conv = nn.Conv1d(32, 32, 3, padding=1)
        self.wide = nn.Linear(32, 64)
        self.gate = nn.Linear(32, 64, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.conv(self.table(ids).transpose(1, 2)).transpose(1, 2)
        found: Tensor = torch.relu(self.wide(hidden)) * self.gate(hidden)
        return found


def _ids() -> Tensor:
    return torch.arange(14).reshape(2, 7) * 5 % 96


@pytest.fixture(scope="module")
def programs() -> dict[str, ExportedProgram]:
    """The model above by compute dtype."""
    torch.manual_seed(0)
    wide = captured(Mixed(), _ids(), dynamic=TOKENS)
    low = {name: rewritten(wide, f"unify-dtype{{to={name}}}")[0] for name in ("fp16", "bf16")}
    return {"fp32": wide, **low}


@pytest.mark.parametrize(
    ("precision", "form", "counts"),
    [
        ("fp16", "static", {Q: 1, DQ: 5, "MatMul": 2, "Gather": 1, "Conv": 1}),
        ("fp16", "storage", {Q: 0, DQ: 4, "MatMul": 2, "Gather": 1, "Conv": 1}),
        pytest.param("fp32", "static", {Q: 1, DQ: 5, "Conv": 1}, marks=pytest.mark.slow),
        pytest.param("bf16", "static", {Q: 1, DQ: 5}, marks=pytest.mark.slow),
        pytest.param("fp32", "storage", {Q: 0, DQ: 4}, marks=pytest.mark.slow),
    ],
)
def test_values_are_dequantized_into_the_ops_that_read_them(
    programs: dict[str, ExportedProgram],
    tmp_path: Path,
    precision: str,
    form: Form,
    counts: dict[str, int],
) -> None:
    program = quantized(programs[precision], form, FP8)
    network = network_of(program, tmp_path)
    assert {op: op_count(network, op) for op in counts} == counts
    for node in nodes_in(network.graph):
        if node.op_type == "MatMul":
            sources = [n.op_type for n in network.graph.node if n.output[0] in node.input]
            assert DQ in sources
    with safe_open(tmp_path / NETWORK_WEIGHTS_FILE, "pt") as file:
        stored = {file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
    assert stored == {"F8_E4M3"}
    found, expected = run_network(network, _ids())[0].double(), in_torch(program, _ids())[0]
    wrong = in_torch(quantized(programs[precision], form, FP8, factor=1.1), _ids())[0]
    # A value that meets the other of two fp8 numbers is off by a sixteenth of itself.
    assert relative_error(found, expected) < relative_error(wrong, expected) / 5
    if precision == "fp32":
        assert relative_error(found, expected) < 1e-6


def _loses(program: ExportedProgram, tmp_path: Path) -> str:
    with pytest.raises(LoweringError) as caught:
        tensorrt_onnx(order_of(program, tmp_path))
    return str(caught.value)


@pytest.mark.parametrize("size", [1e-9, 1e9])
def test_a_scale_that_fp16_cannot_hold_is_refused(
    programs: dict[str, ExportedProgram], tmp_path: Path, size: float
) -> None:
    """Silently in fp32 it would be a product that TensorRT does not fuse."""
    program = structural_copy(programs["fp16"])
    name = next(n for n in program.state_dict if n.endswith("gate.weight"))
    program.state_dict[name] = nn.Parameter(program.state_dict[name] * size, False)
    message = _loses(quantized(program, "static", FP8), tmp_path)
    assert "does not fit float16" in message
    assert "module 'gate', test_tensorrt_quantized.py:" in message


@pytest.mark.parametrize(
    ("form", "dtype", "expected"),
    [
        ("storage", torch.float8_e5m2, "quantized to float8_e5m2, expected fp8 or int8"),
        ("row", FP8, "computed from each value, expected a static one"),
        ("tensor", FP8, "computed from each value, expected a static one"),
        ("row", torch.int8, "computed from each value, expected a static one"),
        ("blocks", torch.int8, "its blocks have 8 bits, expected 4"),
        ("activation blocks", torch.int8, "it rounds blocks of what it reads"),
    ],
)
def test_what_has_no_such_form_is_refused(
    programs: dict[str, ExportedProgram],
    tmp_path: Path,
    form: Form,
    dtype: torch.dtype,
    expected: str,
) -> None:
    message = _loses(quantized(programs["fp32"], form, dtype, kinds=("linear",)), tmp_path)
    assert expected in message
    assert "module 'wide', test_tensorrt_quantized.py:" in message


class Wide(nn.Module):
    """Large enough for a plan to think that fp8 pays; the head is left alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32, 1040)
        self.second = nn.Linear(1040, 1040, bias=False)
        self.head = nn.Linear(1040, 16)

    def forward(self, x: Tensor) -> Tensor:
        head: Tensor = self.head(torch.relu(self.second(torch.relu(self.first(x)))))
        return head


def test_a_plan_for_tensorrt_becomes_static_products(tmp_path: Path) -> None:
    """From the planning pass to the graph: one scale for what is read, one for each row."""
    torch.manual_seed(0)
    module = Wide()
    with torch.no_grad():
        module.second.weight[3] = 0.0  # a row without a scale of its own
        module.second.weight[4] *= 1e-6  # and one below what fp16 holds
    x = torch.randn(3, 5, 32)
    program = captured(module, x)
    exact = in_torch(program, x)[0]
    pipeline = (
        "unify-dtype{to=fp16},canonicalize,plan-fp8{target=tensorrt arch=sm90},"
        "fp8-matmul{scale_dtype=fp16}"
    )
    after, sites = rewritten(program, pipeline, calibrated(program, x))
    plan = plan_of(after)
    assert plan is not None
    chosen = {p.module: (p.choice, p.weights, p.activations) for p in plan.layers}
    native = ("w8a8-static", "row", "tensor")
    assert chosen == {"first": native, "second": native, "head": ("keep", "row", None)}
    assert [site.module for site in sites if site.rewritten] == ["first", "second"]
    network = network_of(after, tmp_path)
    assert (op_count(network, Q), op_count(network, DQ), op_count(network, "MatMul")) == (2, 4, 3)
    made: dict[str, Any] = {i.name: i for i in network.graph.initializer}
    sizes = [made[n.input[1]].dims for n in network.graph.node if n.op_type in (Q, DQ)]
    assert sorted(map(list, sizes)) == [[], [], [], [], [1040], [1040]]
    assert all(
        made[n.input[1]].data_type == onnx.TensorProto.FLOAT16
        for n in network.graph.node
        if n.op_type in (Q, DQ)
    )
    found, lowered = run_network(network, x)[0], in_torch(after, x)[0]
    assert relative_error(lowered, exact) < 0.1
    assert relative_error(found, lowered) < relative_error(lowered, exact) / 3
    smallest = min(numpy_helper.to_array(made[name]).min() for name in made if "scale" in name)
    assert np.float16(smallest) > 0


class Layers(nn.Module):
    """Convolutions of every kind, and linears; the rows of one do not divide into blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.norm = nn.BatchNorm2d(16)
        self.grouped = nn.Conv2d(16, 16, 3, padding=1, groups=4)
        self.up = nn.ConvTranspose2d(16, 8, 2, stride=2, groups=2)
        self.wide = nn.Linear(8, 64)
        self.block = nn.Linear(64, 48)
        self.head = nn.Linear(48, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.norm(self.stem(x)))
        hidden = self.up(hidden + torch.relu(self.grouped(hidden)))
        hidden = torch.relu(self.wide(hidden.mean((2, 3))))
        found: Tensor = self.head(torch.relu(self.block(hidden)))
        return found


@pytest.fixture(scope="module")
def layers() -> tuple[ExportedProgram, Tensor]:
    torch.manual_seed(0)
    module = Layers().eval()
    x = torch.randn(3, 3, 6, 6)
    return captured(module, x), x


STATIC, ROWS = ("w8a8-static", "row", "tensor"), ("storage", "row", None)
CONVS = ("stem", "grouped", "up")


@pytest.mark.parametrize(
    ("precision", "arch", "forms", "held"),
    [
        ("int8", "sm75", dict.fromkeys((*CONVS, "wide", "block"), STATIC), "int8"),
        ("int8-storage", "sm75", dict.fromkeys((*CONVS, "wide", "block"), ROWS), "int8"),
        (
            "int4-storage",
            "sm80",
            {**dict.fromkeys((*CONVS, "wide"), ROWS), "block": ("storage", "block", None)},
            "int4",
        ),
        (
            "nvfp4-storage",
            "sm120",
            {**dict.fromkeys((*CONVS, "wide"), ROWS), "block": ("storage", "block", None)},
            "nvfp4",
        ),
        (
            "mxfp8-storage",
            "sm120",
            {**dict.fromkeys((*CONVS, "wide"), ROWS), "block": ("storage", "block", None)},
            "mxfp8",
        ),
    ],
)
def test_a_quantized_plan_is_built(
    layers: tuple[ExportedProgram, Tensor],
    tmp_path: Path,
    precision: str,
    arch: str,
    forms: dict[str, Any],
    held: str,
) -> None:
    program, x = layers
    target = target_of("tensorrt-rtx")
    pipeline = target.pipeline(precision, arch=arch)
    after, _ = rewritten(program, pipeline, calibrated(program, x))
    plan = plan_of(after)
    assert plan is not None
    made = {
        p.module: (p.choice, p.weights, p.activations) for p in plan.layers if p.choice != "keep"
    }
    expected = {name: form for name, form in forms.items() if name != "stem" or name in made}
    assert made == expected
    reasons = {p.module: p.reason for p in plan.layers}
    size = {"int4": 64, "nvfp4": 16, "mxfp8": 32}.get(held)
    assert reasons["wide"] == (f"K=8 is not whole blocks of {size}" if size else "")
    network = network_of(after, tmp_path)
    lowered = in_torch(after, x)[0]
    found = _run_as_twin(tmp_path, "x", x) if "fp" in held else run_network(network, x)[0]
    loss = relative_error(lowered, in_torch(program, x)[0])
    assert 1e-4 < loss < {"int4": 0.2, "nvfp4": 0.2}.get(held, 0.05)
    assert relative_error(found, lowered) < loss / 3
    assert quantized_format(tensorrt_onnx(order_of(after, tmp_path))) == held
    built(after, tmp_path, arch)


def _run_as_twin(folder: Path, name: str, x: Tensor) -> Tensor:
    """What a network gives whose weights ONNX Runtime has no kernels for."""
    session = open_twin(folder / NETWORK_FILE, 1)
    return torch.from_numpy(from_ort(session.run({name: x.numpy()}, ["out"])["out"]).copy())


def _hard_weight() -> np.ndarray[Any, Any]:
    """[32, 128]: what rounding by blocks may get wrong, each in rows of its own."""
    weight = np.random.default_rng(0).standard_normal((32, 128)).astype(np.float32)
    weight[0] = 0.0
    weight[1, 5] = 700.0  # an outlier, beside which all else in its block is nothing
    weight[2] *= 1e-6  # scales that e4m3 does not hold
    weight[3, :64] *= 1e-9
    ties = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0])
    weight[4] = np.tile(np.concatenate([ties, -ties]), 8) * 2.0  # every one of E2M1
    weight[5] = np.tile(np.array([448.0, 464.0, 479.0, 480.0, 511.0, 512.0, 1.0, 2.0**-10]), 16)
    weight[6] = 2.0 ** -np.arange(128.0)
    weight[7] = np.float32(700.0)
    return weight


def _int4(weight: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    blocks = weight.reshape(32, -1, 64)
    scale = np.maximum(np.abs(blocks).max(-1, keepdims=True) / np.float32(127), 2.0**-40)
    scale = (scale * np.float32(127 / 7)).astype(np.float32)
    rounded = np.clip(np.rint(blocks / scale), -7, 7).astype(ml_dtypes.int4).astype(np.float32)
    found: np.ndarray[Any, Any] = (rounded * scale).reshape(weight.shape)
    return found


def _nvfp4(weight: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    blocks = weight.reshape(32, -1, 16)
    wanted = np.maximum(np.abs(blocks).max(-1, keepdims=True) / np.float32(6), 2.0**-40)
    outer = 2.0 ** np.ceil(np.log2(np.float64(wanted.max() / np.float32(448))))
    outer = np.float32(max(outer, 2.0**-14))
    inner = np.clip(wanted / outer, 2.0**-9, 448).astype(ml_dtypes.float8_e4m3fn)
    scale = inner.astype(np.float32) * outer
    values = np.clip(blocks / scale, -6, 6).astype(ml_dtypes.float4_e2m1fn).astype(np.float32)
    found: np.ndarray[Any, Any] = (values * scale).reshape(weight.shape)
    return found


def _mxfp8(weight: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    blocks = weight.reshape(32, -1, 32)
    wanted = np.maximum(np.abs(blocks).max(-1, keepdims=True) / np.float32(448), 2.0**-40)
    scale = (2.0 ** np.ceil(np.log2(wanted.astype(np.float64)))).astype(np.float32)
    assert (scale == scale.astype(ml_dtypes.float8_e8m0fnu).astype(np.float32)).all()
    values = (blocks / scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    found: np.ndarray[Any, Any] = (values * scale).reshape(weight.shape)
    return found


@pytest.mark.parametrize(
    ("options", "bits", "block", "expected"),
    [
        ("plan-int8{mode=storage arch=sm80 bits=4", 4, 64, _int4),
        ("plan-fp8{mode=storage arch=sm120 bits=4", 4, 16, _nvfp4),
        ("plan-fp8{mode=storage arch=sm120 block=32", 8, 32, _mxfp8),
    ],
)
def test_stored_blocks_are_bit_for_bit_those_of_ml_dtypes(
    tmp_path: Path, options: str, bits: int, block: int, expected: Callable[..., Any]
) -> None:
    """In the program that is judged, in the simulation of the plan, and in the network's file."""
    weight = _hard_weight()
    module = nn.Linear(128, 32, bias=False)
    module.weight.data = torch.from_numpy(weight)
    one = torch.eye(128)
    rewrites = "int8-matmul" if "int8" in options else "fp8-matmul"
    pipeline = f"{options} target=tensorrt measure=false heads=true}},{rewrites}"
    after, _ = rewritten(captured(module, one), pipeline)
    plan = plan_of(after)
    assert plan is not None
    [layer] = plan.layers
    assert (layer.bits, layer.block) == (bits, block)
    wanted = torch.from_numpy(expected(weight))
    assert torch.equal(in_torch(after, one)[0].T, wanted)
    grid = grid_of(plan.format, plan.arch, layer.bits, layer.block)
    if bits == 8 or block == 16:  # int4 takes the quotient by another number of steps
        assert torch.equal(fake_weight(torch.from_numpy(weight), layer, grid), wanted)
    network = network_of(after, tmp_path)
    assert torch.equal(_run_as_twin(tmp_path, "input", one).T, wanted)
    held = {tensor.data_type for tensor in network.graph.initializer}
    assert held & {INT4, FLOAT4, onnx.TensorProto.UINT8}  # of MXFP8, the exponents
    size = (tmp_path / NETWORK_WEIGHTS_FILE).stat().st_size
    assert size < 128 * 32 * bits // 8 + 2 * 1024


def test_e2m1_rounds_as_ml_dtypes_does() -> None:
    values = np.concatenate([np.linspace(-7, 7, 4001), np.arange(-28, 29) / 4]).astype(np.float32)
    expected = np.clip(values, -6, 6).astype(ml_dtypes.float4_e2m1fn).astype(np.float32)
    x, one = torch.from_numpy(values), torch.ones(())
    assert torch.equal(ours.quantize(x, one, E2M1).float(), torch.from_numpy(expected))


def built(program: ExportedProgram, folder: Path, arch: str) -> None:
    pytest.importorskip("tensorrt_rtx_bindings", reason="TensorRT-RTX is not installed")
    target = target_of("tensorrt-rtx")
    order = replace(order_of(program, folder), options=TensorRTRTXOptions(), arch=arch)
    assert target.lower(order).files[0] == "engine.plan"


def test_what_int8_cannot_hold_saturates_as_in_onnx(tmp_path: Path) -> None:
    """QuantizeLinear has -128, which our op leaves out; the program that is judged has it, too."""
    torch.manual_seed(0)
    x = torch.randn(4, 32) * 20
    program = quantized(captured(nn.Linear(32, 8), x), "static", torch.int8, largest=8.0)
    order = order_of(program, tmp_path)
    judged = in_torch(order.program, x)[0]
    found = run_network(network_of(program, tmp_path), x)[0]
    assert relative_error(found, judged) < 1e-6
    assert relative_error(in_torch(program, x)[0], judged) > 1e-3
