"""stagger-rows: columns of zeros where rows of a product would share the lines of a cache."""

from pathlib import Path

import golden
import onnx_ir as ir
import pytest
import torch
from lowering import lower, run
from programs import TOKENS, captured, ir_diff, outputs, rewritten
from torch import Tensor, nn

from enginecast.exporters.onnx.lower import GRAPH_FILE, lowering
from enginecast.passes.ir.edit import shape_of

WIDTH = 1024


class Net(nn.Module):
    """Two linears that read one value, and one whose rows lie well."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(24, WIDTH)
        self.one, self.two = nn.Linear(WIDTH, 8), nn.Linear(WIDTH, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        wide = self.up(x).relu()
        found: Tensor = self.one(wide) - self.two(wide)
        return found


def example(rows: int = 16) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return Net(), torch.randn(2, rows // 2, 24)


def test_rows_are_longer_by_a_line_of_the_cache() -> None:
    net, x = example()
    program = captured(net, x, dynamic=TOKENS)
    after, sites = rewritten(program, "stagger-rows")
    assert [site.rewritten for site in sites] == [True, True]
    golden.check("stagger_rows.diff", ir_diff(program, after))
    assert {"s", "S"} & {str(size)[0] for size in shape_of(after.graph.output_node().args[0][0])}
    other = torch.randn(4, 9, 24)
    torch.testing.assert_close(outputs(after, other), outputs(program, other))


def test_an_engine_pads_a_value_once_and_no_weight(tmp_path: Path) -> None:
    net, x = example()
    lower(captured(net, x, dynamic=TOKENS), tmp_path)
    nodes = list(ir.load(tmp_path / GRAPH_FILE).graph)
    assert [node.op_type for node in nodes].count("Pad") == 1
    assert not any(node.op_type == "Transpose" for node in nodes)
    torch.testing.assert_close(run(tmp_path, x)[0], net(x))


@pytest.mark.parametrize("reader", ["onnxruntime-cpu", "onnxruntime-cuda", "tensorrt", "openvino"])
def test_only_products_of_a_cpu_are_changed(reader: str) -> None:
    assert ("stagger-rows" in lowering(reader)) == (reader in ("onnxruntime-cpu", "openvino"))  # type: ignore[arg-type]
