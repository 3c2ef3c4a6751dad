"""Quantized values in ONNX: which form each takes, what lies in the file, what is refused."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from lowering import lower
from programs import TOKENS, Function, captured, relative_error, rewritten
from quantized_programs import FP8, Form, in_torch, quantized
from safetensors import safe_open
from torch import Tensor, nn
from torch.export import ExportedProgram

from enginecast.errors import LoweringError, MissingError, SpecError
from enginecast.exporters.onnx.lower import GRAPH_FILE, lower_to_onnx, lowering
from enginecast.exporters.target import Artifact, LoweringRequest
from enginecast.exporters.weights.file import WEIGHTS_FILE
from enginecast.ops.blockwise_linear import blockwise_linear
from enginecast.passes.registry import build
from enginecast.runtime.sessions.onnxruntime import (
    CPU_PROVIDER,
    OrtSession,
    create_session,
    options_for,
)
from enginecast.runtime.values.arrays import from_ort

ours = torch.ops.enginecast
INT8 = torch.int8
NBITS, TO_FLOAT = "com.microsoft::MatMulNBits", "com.microsoft::MatMulIntegerToFloat"
Q, DQ = "QuantizeLinear", "DequantizeLinear"


class Gated(nn.Module):
    """An embedding, two linears that share an input, and one that reads their product."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(96, 32)
        self.wide = nn.Linear(32, 64)
        self.gate = nn.Linear(32, 64, bias=False)
        self.narrow = nn.Linear(64, 48)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.table(ids)
        narrow: Tensor = self.narrow(torch.relu(self.wide(hidden)) * self.gate(hidden))
        return narrow


@pytest.fixture(scope="module")
def gated() -> ExportedProgram:
    torch.manual_seed(0)
    return captured(Gated(), _ids(), dynamic=TOKENS)


@pytest.fixture(scope="module")
def half(gated: ExportedProgram) -> ExportedProgram:
    return rewritten(gated, "unify-dtype{to=fp16}")[0]


def _ids() -> Tensor:
    return torch.arange(14).reshape(2, 7) * 5 % 96


@dataclass(frozen=True)
class Made:
    """An engine of the model above: where it lies, and what it and its program compute."""

    folder: Path
    lowered: Artifact
    found: Tensor
    expected: Tensor


class Engines:
    """Each is made when a test first asks for it."""

    def __init__(self, program: ExportedProgram, root: Path) -> None:
        self.program, self.root = program, root
        self.made: dict[Any, Made] = {}

    def __call__(
        self, form: Form, dtype: torch.dtype, device: str = "cpu", *, bits: int = 8
    ) -> Made:
        key = (form, dtype, device, bits)
        if key not in self.made:
            folder = self.root / str(len(self.made))
            program = quantized(self.program, form, dtype, bits=bits)
            found, lowered = engine(program, folder, _ids(), device=device)
            self.made[key] = Made(folder, lowered, found, in_torch(program, _ids())[0])
        return self.made[key]


@pytest.fixture(scope="module")
def engines(gated: ExportedProgram, tmp_path_factory: pytest.TempPathFactory) -> Engines:
    return Engines(gated, tmp_path_factory.mktemp("engines"))


def engine(
    program: ExportedProgram, folder: Path, *inputs: Tensor, device: str = "cpu"
) -> tuple[Tensor, Artifact]:
    """What the engine of a program makes of the inputs, with the options that the runtime uses."""
    lowered = lower(program, folder, device=device)
    options = options_for("fp32", CPU_PROVIDER, lowered.quantized)
    session = create_session(folder / GRAPH_FILE, [CPU_PROVIDER], 1, options)
    names = [found.name for found in session.get_inputs()]
    feeds = {name: x.numpy() for name, x in zip(names, inputs, strict=True)}
    found = OrtSession(session, CPU_PROVIDER, GRAPH_FILE).run(feeds, ["out"])["out"]
    return torch.from_numpy(from_ort(found).copy()), lowered


def graph_of(folder: Path) -> Any:
    return onnx.load(folder / GRAPH_FILE, load_external_data=False).graph


def nodes_of(folder: Path, op: str) -> list[Any]:
    return [node for node in graph_of(folder).node if node.op_type == op]


def dtypes_in(folder: Path) -> dict[tuple[int, ...], str]:
    """Shapes of the stored weights and their dtypes as safetensors names them."""
    with safe_open(folder / WEIGHTS_FILE, "pt") as file:
        slices = [file.get_slice(name) for name in file.keys()]  # noqa: SIM118 - no dict
        return {tuple(found.get_shape()): found.get_dtype() for found in slices}


@pytest.mark.parametrize(
    ("form", "dtype", "device", "expected"),
    [
        ("tensor", INT8, "cpu", {Q: 2, TO_FLOAT: 3, "ReduceMin": 2, "Add": 0}),
        ("row", INT8, "cpu", {Q: 2, TO_FLOAT: 3, "ReduceMax": 2, "Abs": 0, "MatMulInteger": 0}),
        ("row", INT8, "cuda", {"MatMulInteger": 3, TO_FLOAT: 0, "Round": 2}),
        ("blocks", INT8, "cpu", {NBITS: 3, "Add": 0, "MatMul": 0}),
        ("row", FP8, "cpu", {Q: 0, "Clip": 2, DQ: 3, "MatMul": 3}),
    ],
)
def test_forms(
    gated: ExportedProgram,
    engines: Engines,
    form: Form,
    dtype: torch.dtype,
    device: str,
    expected: dict[str, int],
) -> None:
    made = engines(form, dtype, device)
    assert {op: made.lowered.ops.get(op, 0) for op in expected} == expected
    assert made.lowered.quantized == ("fp8" if dtype == FP8 else "int8")
    assert made.lowered.opset >= 21
    assert ("com.microsoft" in made.lowered.domains) == any("::" in op for op in made.lowered.ops)
    # Nothing but the order of sums differs: with this seed no value meets another rounding.
    assert relative_error(made.found, made.expected) < 1e-6
    wrong = in_torch(quantized(gated, form, dtype, factor=1.01), _ids())[0]
    assert relative_error(wrong, made.expected) > 1e-3


@pytest.mark.parametrize("bits", [4, 8])
def test_blocks_are_packed_without_loss(bits: int) -> None:
    torch.manual_seed(bits)
    limit = 1 << (bits - 1)
    weight = torch.randint(-limit, limit, (6, 64), dtype=INT8)
    scale, x = torch.rand(6, 2) + 0.1, torch.randn(3, 5, 64)
    packed = ours.pack_blocks(weight, 32, bits)
    assert packed.shape == (6, 2, 32 * bits // 8)
    found = ours.packed_linear(x, packed, scale, None, bits, False)
    assert torch.equal(found, blockwise_linear(x, weight, scale, None, bits, False))


def test_every_fp8_value_of_a_table_comes_back(tmp_path: Path) -> None:
    values = torch.arange(256, dtype=torch.uint8).view(FP8).float()
    table = nn.Embedding(64, 4, _weight=values.nan_to_num(0).reshape(64, 4))
    program = captured(table, torch.arange(64).reshape(2, 32), dynamic=TOKENS)
    program = quantized(program, "storage", FP8)
    found, lowered = engine(program, tmp_path, torch.arange(64).reshape(2, 32))
    assert torch.equal(found, in_torch(program, torch.arange(64).reshape(2, 32))[0])
    assert lowered.ops["Gather"] == 3


@pytest.mark.parametrize("form", ["static", pytest.param("row", marks=pytest.mark.slow)])
def test_gemm_float8_is_an_option_for_cuda(
    half: ExportedProgram, tmp_path: Path, form: Form
) -> None:
    program = quantized(half, form, FP8)
    ready, _ = rewritten(program, lowering("onnxruntime-cuda", gemm_float8=True))
    lowered = lower_to_onnx(LoweringRequest(ready, tmp_path, ["out"]), "onnxruntime-cuda")
    gemms = nodes_of(tmp_path, "GemmFloat8")
    assert (len(gemms), lowered.ops.get("MatMul", 0)) == (3, 0)
    assert all(onnx.helper.get_node_attr_value(node, "transB") == 1 for node in gemms)
    assert lowered.quantized == "fp8"
    stored = dtypes_in(tmp_path)
    assert stored[64, 32] == stored[48, 64] == "F8_E4M3"
    # Its types fit the op; the CPU has no kernel.
    with pytest.raises(MissingError, match="GemmFloat8"):
        create_session(tmp_path / GRAPH_FILE, [CPU_PROVIDER], 1)
    with pytest.raises(SpecError, match="CUDA alone"):
        build(lowering("onnxruntime-cpu", gemm_float8=True))


def refused(function: Any, inputs: Sequence[Tensor]) -> str:
    program = captured(Function(function), *inputs)
    with pytest.raises(LoweringError) as caught:
        rewritten(program, "legalize-quantized")
    return str(caught.value)


def test_refusals() -> None:
    def of(dtype: torch.dtype) -> Any:
        return lambda x: ours.dequantize(
            ours.quantize(x, x.new_ones(()), dtype), x.new_ones(()), x.dtype
        )

    x = torch.randn(2, 3)
    assert "no kernels that quantize bfloat16" in refused(of(FP8), [x.bfloat16()])
    assert "no kernels for float8_e4m3fnuz" in refused(of(torch.float8_e4m3fnuz), [x])
    assert "rounds nothing" in refused(of(torch.float32), [x])
