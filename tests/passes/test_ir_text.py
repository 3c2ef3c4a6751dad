"""The text of a program: one golden, symbols that do not depend on torch's names, diffs."""

import golden
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram, export

from enginecast.passes.ir.source import module_path, source_line
from enginecast.passes.ir.text import diff_ir, print_ir


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.count: Tensor
        self.count.add_(1)
        return (x.to(torch.float16) * self.weight).clamp(min=0.5)


class Everything(nn.Module):
    """A parameter, a mutated buffer, a constant, symbolic sizes, a tuple, an integer output."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = Scale()

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, int]:
        left, _ = torch.split(self.scale(x), 2, dim=-1)
        shift = torch.tensor([1.0, 2.0])
        padded = torch.cat([left, left]).masked_fill(mask, float("-inf"))
        return padded + shift, x.shape[0]


def captured() -> ExportedProgram:
    rows = Dim("rows", min=2, max=8)
    return export(
        Everything().eval(),
        (torch.randn(3, 4), torch.zeros(6, 1, dtype=torch.bool)),
        dynamic_shapes=({0: rows}, {0: 2 * rows}),
    )


class Branch(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x - 1, (x,))  # type: ignore[no-any-return]


def test_golden_text() -> None:
    golden.check("ir_text.txt", print_ir(captured()))


def test_graphs_of_a_branch_are_printed_under_it() -> None:
    text = print_ir(export(Branch().eval(), (torch.randn(2),)))
    assert '%true_graph_0 = attribute "true_graph_0"\n    %x: f32[2] = input\n' in text
    assert "    %sub: f32[2] = aten.sub.Tensor(%x, 1)" in text
    assert "= higher_order.cond(%gt, %true_graph_0, %false_graph_0, [%x])" in text
    assert "eval_with_key" not in text


def test_diff_shows_the_changed_lines_and_little_else() -> None:
    before = print_ir(captured())
    after = before.replace("aten.clamp", "aten.relu")
    lines = diff_ir(before, after).splitlines()
    assert lines[:2] == ["--- before", "+++ after"]
    assert sum(line.startswith("+%") for line in lines) == 1
    assert sum(line.startswith("-%") for line in lines) == 1
    assert len(lines) == 7


def test_nodes_know_their_module_and_line() -> None:
    nodes = {node.name: node for node in captured().graph.nodes}
    assert (module_path(nodes["mul"]), module_path(nodes["cat"])) == ("scale", "")
    assert source_line(nodes["mul"]).startswith("test_ir_text.py:")
    assert source_line(nodes["x"]) == ""
    sizes = [node for name, node in nodes.items() if name.startswith("sym_size")]
    assert [(module_path(node), source_line(node)) for node in sizes] == [("", "")] * len(sizes)
    assert sizes


def test_source_line_is_the_last_frame_outside_torch() -> None:
    node = next(iter(captured().graph.nodes))
    node.meta["stack_trace"] = (
        '  File "/home/me/model.py", line 7, in forward\n    y = self.norm(x)\n'
        '  File "/opt/torch/mine.py", line 9, in forward\n    return f(x)\n'
        '  File "/x/site-packages/torch/nn/functional.py", line 3, in f\n    pass\n'
    )
    assert source_line(node) == "mine.py:9"
    node.meta["nn_module_stack"] = {"a": ("L['self'].block.0", object)}
    assert module_path(node) == "block.0"
