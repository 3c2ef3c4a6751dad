"""Two programs that compute the same, whatever their nodes are called and in which order."""

import pytest
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from enginecast.passes.ir.base import PassContext
from enginecast.passes.ir.computation import computation
from enginecast.passes.ir.edit import structural_copy
from enginecast.passes.ir.light_values import value_digest
from enginecast.passes.ir.pipeline import run_pipeline
from enginecast.passes.registry import build
from enginecast.verification.boundaries import _digest


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


def test_names_are_no_part_of_it(program: ExportedProgram) -> None:
    assert computation(changed(program, "name")) == computation(program)


@pytest.mark.parametrize("what", ["number", "kind of number", "operand", "op"])
def test_what_is_computed_is(program: ExportedProgram, what: str) -> None:
    assert computation(changed(program, what)) != computation(program)


def test_another_weight_is_another_computation(program: ExportedProgram) -> None:
    copy = structural_copy(program)
    copy.state_dict["second"] = nn.Parameter(torch.ones(4))
    assert computation(copy) != computation(program)


def test_what_gives_its_input_counts_for_nothing(program: ExportedProgram) -> None:
    for rate, train, same in ((0.5, False, True), (0.5, True, False)):
        copy = structural_copy(program)
        mul = next(node for node in copy.graph.nodes if "mul" in str(node.target))
        with copy.graph.inserting_after(mul):
            drop = copy.graph.call_function(torch.ops.aten.dropout.default, (mul, rate, train))
        drop.meta = dict(mul.meta)
        mul.replace_all_uses_with(drop, lambda user, drop=drop: user is not drop)
        assert (computation(copy) == computation(program)) is same


def test_a_hoisted_expression_is_the_same_computation(program: ExportedProgram) -> None:
    copy = structural_copy(program)
    run_pipeline(build("hoist-weights"), copy, PassContext())
    assert [
        n for n in copy.graph.nodes if "permute" in str(n.target) or "t." in str(n.target)
    ] == []
    assert computation(copy) == computation(program)


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


def test_the_digest_of_a_value_is_that_of_its_numbers() -> None:
    large = torch.randn(3, 1 << 18, generator=torch.Generator().manual_seed(0))
    other = large.clone()
    other[2, 5] += 1
    assert _digest(large) == _digest(large.t().contiguous().t()) != _digest(other)
    assert _digest(torch.tensor([0.0])) == _digest(torch.tensor([-0.0]))
    quiet, payload = torch.tensor([float("nan")]), torch.tensor([0x7FC00001], dtype=torch.int32)
    assert _digest(quiet) == _digest(payload.view(torch.float32))
    assert _digest(torch.empty(0)) == _digest(torch.empty(0))


class Masked(nn.Module):
    """Attention over the first positions, with a mask that is written out in one of two ways."""

    def __init__(self, broadcast: bool, tokens: int = 3) -> None:
        super().__init__()
        self.broadcast, self.tokens = broadcast, tokens

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[-2]
        mask = torch.arange(length)[None, None, None] < self.tokens
        if self.broadcast:
            mask = mask.expand(x.shape[0], 1, length, length).contiguous() & True
        found: Tensor = nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=mask)
        return torch.where(mask[..., :1, :1], found, 0.0) * 2


def masked(broadcast: bool, tokens: int = 3) -> ExportedProgram:
    example = (torch.ones(2, 2, 5, 4),)
    return torch.export.export(Masked(broadcast, tokens), example)


def test_masks_count_by_what_they_are_broadcast_to() -> None:
    cases = [{"x": torch.ones(2, 2, 5, 4)}]
    plain, broadcast, other = masked(False), masked(True), masked(True, tokens=4)
    assert computation(plain) != computation(broadcast)
    assert computation(plain, cases) == computation(broadcast, cases)
    assert computation(plain, cases) != computation(other, cases)


def test_a_broadcast_that_decides_the_shape_counts() -> None:
    class Added(nn.Module):
        def __init__(self, rows: int) -> None:
            super().__init__()
            self.rows = rows

        def forward(self, x: Tensor) -> Tensor:
            return x * torch.arange(4).expand(self.rows, 4)

    x = torch.ones(1, 4)
    one, several = (torch.export.export(Added(rows), (x,)) for rows in (1, 3))
    assert computation(one, [{"x": x}]) != computation(several, [{"x": x}])


def test_one_item_of_any_stride_has_the_digest_of_its_value() -> None:
    strided = torch.arange(6)[3:].as_strided([1], [3])
    assert value_digest([strided]) == value_digest([torch.tensor([3])])
    assert value_digest([strided]) != value_digest([torch.tensor([4])])
