"""The files of TensorRT's form of ONNX: what they hold, and what only the graph in memory says."""

from pathlib import Path

import onnx
import pytest
import torch
from onnx.external_data_helper import ExternalDataInfo
from programs import TOKENS, captured
from tensorrt_networks import order_of, run_network, save_network
from torch import Tensor, nn

from enginecast.exporters.onnx.metadata import LINE, MODULE
from enginecast.exporters.tensorrt.lower import (
    NETWORK_FILE,
    NETWORK_WEIGHTS_FILE,
    tensorrt_onnx,
)


class Normed(nn.Module):
    """A linear that is normed."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(32, 64)
        self.norm = nn.RMSNorm(64, eps=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        normed: Tensor = self.norm(self.wide(x))
        return normed


@pytest.fixture
def program() -> torch.export.ExportedProgram:
    torch.manual_seed(0)
    return captured(Normed(), torch.randn(2, 7, 32), dynamic=TOKENS)


def test_lines_are_in_memory_and_not_in_the_files(
    program: torch.export.ExportedProgram, tmp_path: Path
) -> None:
    model = tensorrt_onnx(order_of(program, tmp_path))
    lines = {node.op_type: node.metadata_props.get(LINE) for node in model.graph}
    assert lines["MatMul"] is not None
    assert lines["MatMul"].startswith("test_tensorrt_onnx.py:")
    modules = {node.op_type: node.metadata_props.get(MODULE) for node in model.graph}
    assert (modules["MatMul"], modules["RMSNormalization"]) == ("wide", "norm")
    assert save_network(model, tmp_path) == (NETWORK_FILE, NETWORK_WEIGHTS_FILE)
    assert lines == {node.op_type: node.metadata_props.get(LINE) for node in model.graph}
    written = (tmp_path / NETWORK_FILE).read_bytes()
    assert b"test_tensorrt_onnx" not in written
    assert str(tmp_path).encode() not in written
    assert MODULE.encode() in written


def test_weights_are_found_beside_the_graph(
    program: torch.export.ExportedProgram, tmp_path: Path
) -> None:
    """As a parser finds them: name of the file, first byte, number of bytes."""
    save_network(tensorrt_onnx(order_of(program, tmp_path)), tmp_path)
    stored = onnx.load(tmp_path / NETWORK_FILE, load_external_data=False)
    (weight,) = [w for w in stored.graph.initializer if w.external_data]
    place = ExternalDataInfo(weight)
    assert place.location == NETWORK_WEIGHTS_FILE
    raw = (tmp_path / NETWORK_WEIGHTS_FILE).read_bytes()[place.offset :][: place.length]
    found = torch.frombuffer(bytearray(raw), dtype=torch.float32).reshape(tuple(weight.dims))
    assert torch.equal(found, program.state_dict["wide.weight"].t())
    x = torch.randn(3, 5, 32)
    got = run_network(onnx.load(tmp_path / NETWORK_FILE), x)[0]
    with torch.no_grad():
        assert torch.allclose(got, program.module()(x), atol=1e-5)
