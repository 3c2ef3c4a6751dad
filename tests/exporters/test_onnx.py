"""Whole models in ONNX: what the graph holds, what lies beside it, and what it computes."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import models
import onnx
import onnxruntime
import pytest
import torch
from exports import Exports
from lowering import error, lower, profile_ops, run
from programs import Function, captured, outputs, rewritten
from safetensors import safe_open
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from enginecast.capture.sources.open_source import open_source
from enginecast.capture.tracing.sizes.shapes import symbol_names
from enginecast.compiler.prepare.program import Prepared, prepare
from enginecast.compiler.request import ModelOptions
from enginecast.compiler.steps import Steps
from enginecast.exporters.onnx.lower import GRAPH_FILE
from enginecast.exporters.onnx.weights import INLINE
from enginecast.exporters.target import Artifact
from enginecast.exporters.weights.file import WEIGHTS_FILE
from enginecast.passes.ir.base import PassContext
from enginecast.passes.ir.text import print_ir
from enginecast.passes.presets import preset
from enginecast.version import __version__


@dataclass(frozen=True)
class Engine:
    prepared: Prepared
    program: ExportedProgram
    folder: Path
    lowered: Artifact

    @property
    def graph(self) -> Any:
        return onnx.load(self.folder / GRAPH_FILE, load_external_data=False)


def exact(made: Engine, inputs: dict[str, Tensor]) -> Tensor:
    """What the captured fp32 program returns."""
    with torch.no_grad():
        found = made.prepared.captured.program.module(check_guards=False)(**inputs)
    result: Tensor = torch.utils._pytree.tree_leaves(found)[0]
    return result


def prepared(folder: str | Path) -> Prepared:
    return prepare(open_source(str(folder)), ModelOptions(), Steps())


def engine(source: Prepared, precision: str, folder: Path) -> Engine:
    captured = source.captured
    context = PassContext(calibration=[case.inputs for case in source.cases])
    program, _ = rewritten(captured.program, preset(precision), context)
    names = symbol_names(captured.program, captured.inputs)
    symbols = {str(symbol): name for symbol, name in names.items()}
    return Engine(source, program, folder, lower(program, folder, source.output_names, symbols))


@pytest.fixture(scope="module")
def t5(exports: Exports, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Engine]:
    """Engines by number of layers and precision; one is of a model whose file is bf16."""
    base = tmp_path_factory.mktemp("t5")
    two = prepared(exports.model("t5"))
    return {
        "2 fp32": engine(two, "fp32", base / "2-fp32"),
        "2 fp16": engine(two, "fp16", base / "2-fp16"),
        "4 fp32": engine(prepared(exports.model("t5-4")), "fp32", base / "4-fp32"),
        "bf16 file": engine(
            prepared(models.tiny_t5(base / "bf16", layers=1, dtype=torch.bfloat16)),
            "fp32",
            base / "bf16-fp32",
        ),
    }


@pytest.mark.parametrize(("key", "layers"), [("2 fp32", 2), ("2 fp16", 2), ("4 fp32", 4)])
def test_every_norm_and_attention_is_one_node(t5: dict[str, Engine], key: str, layers: int) -> None:
    ops = t5[key].lowered.ops
    assert ops["com.microsoft::SkipSimplifiedLayerNormalization"] == 2 * layers
    assert ops["RMSNormalization"] == 1
    assert ops["Attention"] == layers
    assert ops["MatMul"] == 7 * layers
    assert not {"ReduceMean", "Softmax", "Pow", "Sqrt"} & set(ops)


def test_node_count_does_not_creep_up(t5: dict[str, Engine]) -> None:
    assert t5["4 fp32"].lowered.nodes <= 82
    # Three nodes keep the fill of masks above the lowest number of fp32.
    assert t5["2 fp16"].lowered.nodes + 3 == t5["2 fp32"].lowered.nodes
    per_layer = (t5["4 fp32"].lowered.nodes - t5["2 fp32"].lowered.nodes) / 2
    assert per_layer == 12


@pytest.mark.parametrize("key", ["2 fp32", "bf16 file"])
def test_engine_agrees_with_the_captured_program(t5: dict[str, Engine], key: str) -> None:
    made = t5[key]
    for case in made.prepared.cases[:4]:
        mask = case.inputs["attention_mask"].bool()
        wanted = exact(made, case.inputs)[mask]
        found = run(made.folder, *case.inputs.values())[0][mask]
        if mask.any():
            assert error(found, wanted) <= 1e-5 * float(wanted.abs().max()), case.name


def test_fp16_engine_agrees_in_fp16(t5: dict[str, Engine]) -> None:
    made = t5["2 fp16"]
    inputs = made.prepared.cases[0].inputs
    mask = inputs["attention_mask"].bool()
    wanted = exact(made, inputs)[mask]
    found = run(made.folder, *inputs.values())[0][mask]
    assert found.dtype == torch.float16
    assert error(found, wanted) <= 2e-3 * float(wanted.abs().max())


def test_names_and_dimensions_are_the_user_s(t5: dict[str, Engine]) -> None:
    session = onnxruntime.InferenceSession(t5["2 fp32"].folder / GRAPH_FILE)
    seen = {i.name: i.shape for i in (*session.get_inputs(), *session.get_outputs())}
    assert seen == {
        "input_ids": ["batch", "sequence"],
        "attention_mask": ["batch", "sequence"],
        "last_hidden_state": ["batch", "sequence", 32],
    }


def test_graph_says_who_made_it_and_for_what(t5: dict[str, Engine]) -> None:
    made = t5["2 fp32"]
    assert (made.graph.producer_name, made.graph.producer_version) == ("enginecast", __version__)
    imports = {found.domain: found.version for found in made.graph.opset_import}
    assert imports == made.lowered.domains == {"": 23, "com.microsoft": 1}
    assert made.lowered.opset == 23
    assert made.lowered.files == (GRAPH_FILE, WEIGHTS_FILE)
    assert sum(made.lowered.ops.values()) == made.lowered.nodes == len(made.graph.graph.node)


@pytest.mark.parametrize("key", ["2 fp32", "2 fp16", "bf16 file"])
def test_weights_lie_in_one_file_and_all_of_it_is_used(t5: dict[str, Engine], key: str) -> None:
    made, used = t5[key], set()
    for tensor in made.graph.graph.initializer:
        if tensor.data_location != onnx.TensorProto.EXTERNAL:
            assert len(tensor.raw_data) <= INLINE
            continue
        place = {entry.key: entry.value for entry in tensor.external_data}
        assert place["location"] == WEIGHTS_FILE
        used.add(tensor.name)
    with safe_open(made.folder / WEIGHTS_FILE, "pt") as file:
        assert set(file.keys()) == used
        assert "encoder.block.0.layer.0.SelfAttention.q.weight" in used
        dtype = torch.float16 if key == "2 fp16" else torch.float32
        assert {file.get_tensor(name).dtype for name in used} == {dtype}
    names = {path.name for path in made.folder.iterdir()}
    assert names == {GRAPH_FILE, WEIGHTS_FILE}


def test_graph_holds_modules_and_nothing_of_this_machine(t5: dict[str, Engine]) -> None:
    content = (t5["2 fp32"].folder / GRAPH_FILE).read_bytes()
    for trace in (b"site-packages", b".py", os.getcwd().encode(), b"stack_trace", b"pkg.torch"):
        assert trace not in content
    assert b"encoder.block.1.layer.0.SelfAttention" in content


def test_onnx_checker_accepts_it(t5: dict[str, Engine]) -> None:
    for made in t5.values():
        onnx.checker.check_model(made.folder / GRAPH_FILE)


def test_program_is_left_as_it_was(t5: dict[str, Engine], tmp_path: Path) -> None:
    made = t5["2 fp32"]
    before, state = print_ir(made.program), dict(made.program.state_dict)
    lower(made.program, tmp_path, made.prepared.output_names)
    assert print_ir(made.program) == before
    assert made.program.state_dict.keys() == state.keys()
    assert all(made.program.state_dict[name] is tensor for name, tensor in state.items())


AGAIN = """
import sys
from pathlib import Path
sys.path[:0] = [sys.argv[1], sys.argv[1] + "/../support"]
from test_onnx import engine, prepared
base = Path(sys.argv[2])
engine(prepared(models.tiny_t5(base / "model", layers=2)), "fp16", base / "out")
"""


@pytest.mark.slow
def test_another_process_writes_the_same_bytes(t5: dict[str, Engine], tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONHASHSEED": "4711"}
    arguments = [sys.executable, "-c", AGAIN, str(Path(__file__).parent), str(tmp_path)]
    done = subprocess.run(arguments, env=environment, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for name in (GRAPH_FILE, WEIGHTS_FILE):
        assert (tmp_path / "out" / name).read_bytes() == (
            t5["2 fp16"].folder / name
        ).read_bytes(), name


def test_outputs_that_are_one_value_an_input_a_weight_or_called_like_a_node(
    tmp_path: Path,
) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.sin: Tensor
            self.register_buffer("sin", torch.randn(4, 3))

        def forward(self, x: Tensor) -> list[Tensor]:
            positive = x.relu()
            return [positive, positive, x, self.sin.t(), positive.sin().cos() + self.sin[0]]

    names = ["relu", "cos", "sin", "weight", "add"]
    program = captured(Odd(), x := torch.randn(2, 3))
    lower(program, tmp_path, names)
    session = onnxruntime.InferenceSession(tmp_path / GRAPH_FILE)
    assert [output.name for output in session.get_outputs()] == names
    for found, wanted in zip(run(tmp_path, x), outputs(program, x), strict=True):
        assert error(found, wanted) <= 1e-6


def test_sizes_made_of_sizes_carry_the_user_s_names(tmp_path: Path) -> None:
    with torch.no_grad():
        program = torch.export.export(
            Function(lambda x: torch.cat([x, x[:, 1:]], 1)),
            (torch.randn(2, 7),),
            dynamic_shapes=(({0: Dim("b"), 1: Dim("s", min=3)},),),
        )
    sizes = next(n for n in program.graph.nodes if n.op == "placeholder").meta["val"].shape
    lower(program, tmp_path, symbols={str(sizes[0]): "batch", str(sizes[1]): "tokens"})
    session = onnxruntime.InferenceSession(tmp_path / GRAPH_FILE)
    assert session.get_outputs()[0].shape == ["batch", "2*tokens - 1"]


def test_frozen_shapes_carry_the_user_s_names(tmp_path: Path) -> None:
    module = nn.Sequential(nn.GroupNorm(2, 8), nn.SiLU()).eval().requires_grad_(False)
    program = captured(module, torch.randn(2, 8, 4, 4), dynamic={0: Dim("batch", min=1, max=8)})
    symbol = str(next(iter(program.range_constraints)))
    lower(program, tmp_path, symbols={symbol: "batch"})
    graph = onnx.load(tmp_path / GRAPH_FILE, load_external_data=False).graph
    assert graph.output[0].type.tensor_type.shape.dim[0].dim_param == "batch"


def test_batch_norms_are_left_for_the_runtime_to_fold(tmp_path: Path) -> None:
    """The file holds the model's own weights; ONNX Runtime makes one convolution of the two."""

    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(8, 16, 3)
            self.norm = nn.BatchNorm2d(16)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.norm(self.conv(x))
            return result

    module = Normed()
    assert module.norm.running_var is not None
    module.norm.running_var.uniform_(0.5, 2)
    program = captured(module, x := torch.randn(1, 8, 6, 6))
    lowered = lower(program, tmp_path)
    assert lowered.ops == {"BatchNormalization": 1, "Conv": 1}
    executed = profile_ops(tmp_path / GRAPH_FILE, {"x": x.numpy()})
    assert "BatchNormalization" not in executed
    assert error(run(tmp_path, x)[0], outputs(program, x)[0]) <= 1e-5


MEMORY = """
import json, sys, threading, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import torch
from torch import nn
from lowering import lower
from programs import captured
from enginecast.passes.ir.deferred_weights import Expression

def anonymous():
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) << 10

class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(12))
    def forward(self, x):
        for layer in self.layers:
            x = layer(x).relu()
        return x

folder = Path(sys.argv[2])
lower(captured(Net(8), torch.randn(1, 8)), folder / "warm")  # torch.onnx keeps its registry
program = captured(Net(2048).requires_grad_(False), torch.randn(1, 2048))
computed, compute = [], Expression.__call__
def counted(expression):
    computed.append(expression)
    return compute(expression)
Expression.__call__ = counted
before, peak, done = anonymous(), 0, threading.Event()
def watch():
    global peak
    while not done.wait(0.002):
        peak = max(peak, anonymous())
thread = threading.Thread(target=watch)
thread.start()
lower(program, folder / "out")
done.set()
thread.join()
written = (folder / "out" / "weights.safetensors").stat().st_size
print(json.dumps({"growth": peak - before, "written": written, "computed": len(computed)}))
"""


@pytest.mark.slow
def test_weights_are_never_all_in_memory(tmp_path: Path) -> None:
    arguments = [
        sys.executable,
        "-c",
        MEMORY,
        str(Path(__file__).parents[1] / "support"),
        str(tmp_path),
    ]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    largest = 2048 * 2048 * 4
    assert found["written"] > 12 * largest
    assert found["computed"] == 12
    # Two weights at most, and what the conversion itself needs.
    assert found["growth"] < 2 * largest + (48 << 20)
