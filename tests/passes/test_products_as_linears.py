"""Products with a weight that are not linears become such, with every bit."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from planned_programs import quantized_by_plan
from programs import TOKENS, captured, count, outputs, relative_error, same_bits
from torch import Tensor, nn
from torch.export import ExportedProgram
from transformers.pytorch_utils import Conv1D

from enginecast.passes.ir.edit import structural_copy
from enginecast.passes.quantize.measure.quantizable import products_as_linears

WIDTH = 32


class Products(nn.Module):
    """GPT-2's Conv1D and bare weights [K, N]."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        self.conv = Conv1D(48, WIDTH)
        self.w = nn.Parameter(torch.randn(WIDTH, 16) * 0.1)
        self.rows = nn.Parameter(torch.randn(1, WIDTH, 16))

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


def program_of(function: Callable[..., Any]) -> ExportedProgram:
    torch.manual_seed(0)
    module = Products(function).requires_grad_(False)
    module.conv.bias.normal_(std=0.02)
    return captured(module, torch.randn(2, 5, WIDTH), dynamic=TOKENS)


BOTH: Callable[..., Any] = lambda m, x: (m.conv(x.tanh()), x.tanh() @ m.w)  # noqa: E731


def test_every_bit_stays_and_plans_find_them() -> None:
    before = program_of(BOTH)
    after = structural_copy(before)
    assert products_as_linears(after) == 2
    after.graph_module.recompile()
    after.validate()
    assert (count(after, "linear"), count(after, "addmm", "matmul", "mm")) == (2, 0)
    for shape in ((3, 7), (1, 2), (8, 32)):
        assert same_bits(before, after, torch.randn(*shape, WIDTH))
    assert products_as_linears(after) == 0


@pytest.mark.parametrize("form", ["rowwise", "storage"])
def test_they_are_quantized_like_linears(form: str) -> None:
    before = program_of(BOTH)
    linear = structural_copy(before)
    products_as_linears(linear)
    linear.graph_module.recompile()
    after = quantized_by_plan(linear, form)
    x = torch.randn(3, 7, WIDTH)
    for found, expected in zip(outputs(after, x), outputs(before, x), strict=True):
        assert 0.02 < relative_error(found, expected) < 0.05
