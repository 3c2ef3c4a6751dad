"""Edits that every pass stands on."""

import pytest
import torch
from programs import captured
from torch import Tensor, nn
from torch.export.graph_signature import InputKind

from enginecast.passes.ir.edit import add_weights, structural_copy


class Named(nn.Module):
    """Inputs called as Python's builtins are, which fx would rename in a new graph."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, input: Tensor, max: Tensor) -> Tensor:
        result: Tensor = self.linear(input) + max
        return result


@pytest.mark.parametrize("times", [1, 2])
def test_a_copy_keeps_every_name_and_shares_every_weight(times: int) -> None:
    inputs = torch.randn(2, 4), torch.randn(2, 4)
    program = captured(Named(), *inputs)
    copy = program
    for _ in range(times):
        copy = structural_copy(copy)
    copy.validate()
    assert [n.name for n in copy.graph.nodes] == [n.name for n in program.graph.nodes]
    assert all(copy.state_dict[k] is v for k, v in program.state_dict.items())
    assert torch.equal(copy.module()(*inputs), program.module()(*inputs))


def test_weights_stand_in_order_before_the_inputs() -> None:
    inputs = torch.randn(2, 4), torch.randn(2, 4)
    program = captured(Named(), *inputs)
    made = {name: torch.randn(3) for name in ("c", "a", "b")}
    nodes = add_weights(program, made, InputKind.CONSTANT_TENSOR)
    program.validate()
    assert [node.name for node in nodes] == ["w_c", "w_a", "w_b"]
    specs = program.graph_signature.input_specs
    placeholders = [node.name for node in program.graph.nodes if node.op == "placeholder"]
    assert placeholders == [spec.arg.name for spec in specs]
    assert placeholders[-5:] == ["w_c", "w_a", "w_b", "input", "max"]
    assert all(program.constants[name] is tensor for name, tensor in made.items())
