"""Two programs that compute the same, whatever their nodes are called and in which order."""

import pytest
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from enginecast.passes.ir.computation import computation
from enginecast.passes.ir.edit import structural_copy


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.arange(12.0).reshape(4, 3))
        self.second = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.first.t()) * 2 + self.second


@pytest.fixture
def program() -> ExportedProgram:
    return torch.export.export(Model(), (torch.ones(2, 3),))


def changed(program: ExportedProgram, what: str) -> ExportedProgram:
    copy = structural_copy(program)
    mul = next(node for node in copy.graph.nodes if "mul" in str(node.target))
    if what == "name":
        mul._rename("renamed")
    elif what == "number":
        mul.args = (mul.args[0], 3)
    elif what == "kind of number":
        mul.args = (mul.args[0], 2.0)
    elif what == "operand":
        mul.args = (mul.args[0], mul.args[0])
    elif what == "op":
        mul.target = torch.ops.aten.div.Tensor
    return copy


@pytest.mark.parametrize("what", ["number", "kind of number", "operand", "op"])
def test_what_is_computed_is(program: ExportedProgram, what: str) -> None:
    assert computation(changed(program, what)) != computation(program)


def test_what_gives_its_input_counts_for_nothing(program: ExportedProgram) -> None:
    for rate, train, same in ((0.5, False, True), (0.5, True, False)):
        copy = structural_copy(program)
        mul = next(node for node in copy.graph.nodes if "mul" in str(node.target))
        with copy.graph.inserting_after(mul):
            drop = copy.graph.call_function(torch.ops.aten.dropout.default, (mul, rate, train))
        drop.meta = dict(mul.meta)
        mul.replace_all_uses_with(drop, lambda user, drop=drop: user is not drop)
        assert (computation(copy) == computation(program)) is same


def test_a_graph_within_a_graph_counts_as_its_text() -> None:
    class Branch(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x - 1, (x,))
            return found

    program = torch.export.export(Branch(), (torch.ones(3),))
    assert computation(program) == computation(structural_copy(program))
    other = structural_copy(program)
    inner = other.graph_module.true_graph_0
    add = next(node for node in inner.graph.nodes if node.op == "call_function")
    add.args = (add.args[0], 2)
    assert computation(other) != computation(program)
