"""fp8 in TensorRT's form of ONNX: what it is said in, what it computes, what is refused."""

from pathlib import Path
from typing import Any

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
from enginecast.exporters.tensorrt.lower import NETWORK_WEIGHTS_FILE, tensorrt_onnx
from enginecast.passes.ir.edit import structural_copy
from enginecast.passes.ir.quantization_plan import plan_of

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
        ("storage", torch.int8, "quantized to int8, expected fp8"),
        ("storage", torch.float8_e5m2, "quantized to float8_e5m2, expected fp8"),
        ("row", FP8, "computed from each value, expected a static one"),
        ("tensor", FP8, "computed from each value, expected a static one"),
        ("blocks", torch.int8, "quantized to int8"),
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
