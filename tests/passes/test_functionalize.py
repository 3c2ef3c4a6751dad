"""Writes in place become values: every spelling gives the same bits, and nothing writes after."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.utils._pytree import tree_leaves

from enginecast.errors import CaptureError
from enginecast.passes.captured.functionalize import Functionalize
from enginecast.passes.ir.base import PassContext
from enginecast.passes.ir.blocks import all_nodes
from enginecast.passes.ir.edit import structural_copy
from enginecast.passes.ir.pipeline import run_pipeline
from enginecast.passes.ir.traits import Trait, has

Function = Callable[[Tensor], Any]
CASES: dict[str, Function] = {}


def case(function: Function) -> Function:
    CASES[function.__name__] = function
    return function


@case
def column(x: Tensor) -> Tensor:
    y = x * 2
    y[:, 0].clamp_(max=0.2)
    return y + x


@case
def the_input(x: Tensor) -> Tensor:
    before = x * 1
    x[:, 1:3].add_(1)
    return before + x


@case
def view_made_before(x: Tensor) -> Tensor:
    y = x * 2
    row, turned = y[1], y.t()
    y.mul_(3)
    return row.sum() + turned.t()


@case
def view_of_a_view(x: Tensor) -> Tensor:
    y = x + 1
    part = y.t()[1:4].unsqueeze(0).squeeze(0)
    part[:, 0] = 7.0
    return y * part.sum()


@case
def reshaped(x: Tensor) -> Tensor:
    y = x + 1
    flat = y.view(-1)
    flat[3:9:2] = 0.5
    flat.sub_(1)
    return y / 3


@case
def unbound(x: Tensor) -> Tensor:
    y = x + 1
    first, *_, last = y.unbind(1)
    first.copy_(last)
    last.mul_(2)
    return y


@case
def broadcast_together(x: Tensor) -> object:
    y = x * 1
    left, right = torch.broadcast_tensors(y, x)
    row = y[0].broadcast_to(2, 6)
    y.neg_()
    return left, right, row


@case
def diagonal(x: Tensor) -> Tensor:
    y = x.t() @ x
    y.fill_diagonal_(3)
    y.diagonal().mul_(2)
    torch.diagonal(y, 1).add_(2)
    return y


@case
def masked(x: Tensor) -> Tensor:
    y = x + 1
    y[y > 1] = 0.0
    y.masked_fill_(y < 0, 3.0)
    y[torch.tensor([0, 2])] = x[1]
    y.index_put_((torch.tensor([0, 0]),), x[:2], accumulate=True)
    return y


@case
def scattered(x: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    index = x.argsort(1)
    y.scatter_(1, index, x)
    y.scatter_add_(1, index, x)
    return y


@case
def promoted(x: Tensor) -> Tensor:
    y = x.half()
    y += x
    y.mul_(1.1)
    y.eq_(x)
    n = torch.arange(6)
    n[2:] = 2.7
    n.clamp_(max=4)
    return y.float() + n


@case
def outputs_share(x: Tensor) -> tuple[Tensor, ...]:
    y = x + 1
    part = y[:, :2]
    before = part.clone()
    y.relu_()
    part.add_(1)
    return y, part, before, x


@case
def out_argument(x: Tensor) -> Tensor:
    y = torch.empty_like(x)
    torch.mul(x, 3, out=y)
    torch.add(y, x, out=y)
    return y


@case
def inplace_modules(x: Tensor) -> Tensor:
    y = nn.functional.relu(x + 0.1, inplace=True)
    y = nn.functional.dropout(y, 0.5, training=False, inplace=True)
    y = nn.functional.hardtanh(y, -0.5, 0.5, inplace=True)
    return nn.functional.leaky_relu_(y) + nn.functional.silu(y, inplace=True)


@case
def constant(x: Tensor) -> Tensor:
    table = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    table[1:] *= 2
    table[0] = x[0, 0]
    return x + table


@case
def loop(x: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    for step in range(1, 4):
        y[:, step] = y[:, step - 1] + x[:, step]
    return y


@case
def strided(x: Tensor) -> Tensor:
    y = x * 2
    y.t().as_strided([2], [1]).zero_()
    return y


@case
def overlapping_windows(x: Tensor) -> Tensor:
    y = x + 1
    windows = y.unfold(1, 3, 2)
    windows[:, 0].neg_()
    windows[:, :, 2].mul_(2)
    return y + windows.sum()


@case
def branch(x: Tensor) -> object:
    def yes(x: Tensor) -> Tensor:
        y = x + 1
        y[:, 0].mul_(3)
        return y

    def no(x: Tensor) -> Tensor:
        return x.clone()

    z = x * 2
    z[0].zero_()
    return torch.cond(z.sum() > 0, yes, no, (z,))


@case
def accumulated(x: Tensor) -> Tensor:
    y = x.sum(0)
    y.addcmul_(x[0], x[1], value=0.5)
    y.lerp_(x[0], 0.3)
    y.div_(3, rounding_mode="floor")
    return y


class Calls(nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> object:
        return self.function(x)


def program_of(function: Function) -> ExportedProgram:
    example = torch.randn(5, 6)
    return torch.export.export(
        Calls(function), (example,), dynamic_shapes=({0: Dim("n", min=3, max=64)},), strict=False
    )


def functionalized(program: ExportedProgram) -> int:
    """How many writes there were."""
    (run,) = run_pipeline([Functionalize()], program, PassContext())
    return run.rewritten


@pytest.mark.parametrize("name", CASES)
def test_every_spelling_gives_the_same_bits(name: str) -> None:
    before = program_of(CASES[name])
    after = structural_copy(before)
    assert functionalized(after)
    assert not [node for node in all_nodes(after) if has(node, Trait.WRITES)]
    for rows in (3, 5, 8):
        x = torch.randn(rows, 6)
        wanted = CASES[name](x.clone())
        found = after.module()(x)
        pairs = zip(tree_leaves(wanted), tree_leaves(found), strict=True)
        for one, other in pairs:
            assert one.dtype == other.dtype
            assert torch.equal(one, other)


def test_a_write_that_is_not_known_has_its_line() -> None:
    program = program_of(lambda x: (y := x * 2).view(torch.int32).add_(1) + y)
    with pytest.raises(CaptureError, match=r"test_functionalize.py:\d+ .* a view by view"):
        functionalized(program)
