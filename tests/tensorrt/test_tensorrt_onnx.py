"""The files of TensorRT's form of ONNX: what they hold, and what only the graph in memory says."""

from pathlib import Path

import pytest
import torch
from programs import TOKENS, captured
from tensorrt_networks import order_of, save_network
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
