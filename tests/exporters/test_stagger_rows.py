"""stagger-rows: columns of zeros where rows of a product would share the lines of a cache."""

from pathlib import Path

import golden
import onnx_ir as ir
import pytest
import torch
from lowering import lower, run
from programs import TOKENS, Function, captured, count, ir_diff, outputs, reasons, rewritten
from torch import Tensor, nn
from torch.nn.functional import linear

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


def _of_inputs(x: Tensor) -> Tensor:
    return linear(x, x[0])


def test_few_rows_and_weights_of_inputs_are_left_alone() -> None:
    net, x = example(rows=14)
    _, sites = rewritten(captured(net, x), "stagger-rows")
    assert reasons(sites) == ["14 rows, and the columns pay from 16 on"] * 2
    wide = torch.randn(2, 16, WIDTH, generator=torch.Generator().manual_seed(1))
    _, sites = rewritten(captured(Function(_of_inputs), wide), "stagger-rows")
    assert reasons(sites) == ["its weight is computed from inputs"]


@pytest.mark.parametrize(("width", "dtype"), [(1008, torch.float32), (1024, torch.float64)])
def test_other_rows_and_dtypes_are_no_sites(width: int, dtype: torch.dtype) -> None:
    layer = nn.Linear(width, 4, dtype=dtype)
    program = captured(layer, torch.zeros(32, width, dtype=dtype))
    after, sites = rewritten(program, "stagger-rows")
    assert not sites
    assert count(after, "constant_pad_nd.default") == 0


class Chosen(nn.Module):
    """A linear of the rows that the values choose: their number has no captured size."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 8)

    def forward(self, x: Tensor) -> Tensor:
        chosen: Tensor = self.layer(x[x[:, 0] > 0])
        return chosen


def test_rows_whose_number_values_decide_are_left_alone(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net, x = Chosen(), torch.randn(32, WIDTH)
    program = captured(net, x)
    _, sites = rewritten(program, "stagger-rows")
    assert reasons(sites) == ["values decide how many rows it has"]
    lower(program, tmp_path)
    torch.testing.assert_close(run(tmp_path, x)[0], net(x))
