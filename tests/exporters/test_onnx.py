"""Whole models in ONNX: what the graph holds, what lies beside it, and what it computes."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import pytest
import torch
from exports import Exports
from lowering import error, lower, run
from programs import captured, outputs, rewritten
from safetensors import safe_open
from torch import Tensor, nn
from torch.export import ExportedProgram

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
from enginecast.passes.presets import preset


@dataclass(frozen=True)
class Engine:
    prepared: Prepared
    program: ExportedProgram
    folder: Path
    lowered: Artifact

    @property
    def graph(self) -> Any:
        return onnx.load(self.folder / GRAPH_FILE, load_external_data=False)


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
    """Engines of two layers by precision."""
    base = tmp_path_factory.mktemp("t5")
    two = prepared(exports.model("t5"))
    return {
        "2 fp32": engine(two, "fp32", base / "2-fp32"),
        "2 fp16": engine(two, "fp16", base / "2-fp16"),
    }


@pytest.mark.parametrize(("key", "layers"), [("2 fp32", 2), ("2 fp16", 2)])
def test_every_norm_and_attention_is_one_node(t5: dict[str, Engine], key: str, layers: int) -> None:
    ops = t5[key].lowered.ops
    assert ops["com.microsoft::SkipSimplifiedLayerNormalization"] == 2 * layers
    assert ops["RMSNormalization"] == 1
    assert ops["Attention"] == layers
    assert ops["MatMul"] == 7 * layers
    assert not {"ReduceMean", "Softmax", "Pow", "Sqrt"} & set(ops)


def test_node_count_does_not_creep_up(t5: dict[str, Engine]) -> None:
    assert t5["2 fp32"].lowered.nodes <= 58
    # Three nodes keep the fill of masks above the lowest number of fp32.
    assert t5["2 fp16"].lowered.nodes + 3 == t5["2 fp32"].lowered.nodes


def test_names_and_dimensions_are_the_user_s(t5: dict[str, Engine]) -> None:
    session = onnxruntime.InferenceSession(t5["2 fp32"].folder / GRAPH_FILE)
    seen = {i.name: i.shape for i in (*session.get_inputs(), *session.get_outputs())}
    assert seen == {
        "input_ids": ["batch", "sequence"],
        "attention_mask": ["batch", "sequence"],
        "last_hidden_state": ["batch", "sequence", 32],
    }


@pytest.mark.parametrize("key", ["2 fp32", "2 fp16"])
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
