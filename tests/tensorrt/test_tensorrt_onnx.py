"""The files of TensorRT's form of ONNX: what they hold, and what only the graph in memory says."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest
import torch
from programs import TOKENS, Function, captured
from tensorrt_networks import network_of, order_of, run_network, save_network
from torch import Tensor, nn
from torch.export import Dim

from enginecast.exporters.onnx.metadata import LINE, MODULE
from enginecast.exporters.tensorrt.gate.check import check_ready
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


def routed(x: Tensor) -> tuple[Tensor, Tensor]:
    """Two of five experts for each token, sorted as a mixture of experts does."""
    places = x.topk(2)[1].reshape(-1)
    found = torch.sort(places)
    return found[0], places[found[1]] * 1000 + found[1]


def mixed(x: Tensor) -> Tensor:
    return torch.einsum("BI,JI->BJ", x, x.flip(0))


def test_what_tensorrt_does_not_compute_in_bf16_is_computed_in_fp32(tmp_path: Path) -> None:
    def wider(x: Tensor, weight: Tensor) -> Tensor:
        return torch.nn.functional.conv_transpose1d(x, weight)

    x, weight = (torch.randn(*sizes).bfloat16() for sizes in ((1, 4, 8), (4, 4, 3)))
    model = tensorrt_onnx(
        order_of(captured(Function(wider), x, weight, dynamic=({}, {})), tmp_path)
    )
    (node,) = [node for node in model.graph if node.op_type == "ConvTranspose"]
    assert {value.dtype for value in (*node.inputs, *node.outputs) if value} == {ir.DataType.FLOAT}
    assert model.graph.outputs[0].dtype is ir.DataType.BFLOAT16
    assert check_ready(model) == []


@pytest.mark.parametrize("function", [routed, mixed, lambda x: x.cumsum(0)])
def test_what_tensorrt_lacks_is_written_in_what_it_has(
    function: Callable[[Tensor], Any], tmp_path: Path
) -> None:
    """Orders of more than 3840, capital letters, running sums in float64."""
    torch.manual_seed(0)
    x = torch.randn(7, 5)
    program = captured(Function(function), x, dynamic={0: Dim("batch", min=2, max=5000)})
    names = ("out", "more") if function is routed else ("out",)
    network = network_of(program, tmp_path, names)
    model = tensorrt_onnx(order_of(program, tmp_path, names))
    ranges = {str(size): (2, 5000) for size in (model.graph.inputs[0].shape or ())}
    assert check_ready(model, ranges=ranges) == []
    wanted = function(x)
    wanted = wanted if function is routed else (wanted,)
    for found, expected in zip(run_network(network, x), wanted, strict=True):
        torch.testing.assert_close(found, expected)
