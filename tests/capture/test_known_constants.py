"""Sizes that code reads out of tensors of numbers which it has written out."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from enginecast.capture.inputs.specs import DimSpec, InputSpec
from enginecast.capture.sources.factory import FactorySource
from enginecast.capture.tracing.captured import Captured, capture

SIDE = 4


def grid_as_mask(x: Tensor) -> Tensor:
    """A bias over the places of a grid, as detectors compute it from a tensor of its sides."""
    shapes = torch.tensor([(SIDE, SIDE)], dtype=torch.long)
    height: Any = shapes[0, 0]  # torch's types have no tensors as bounds
    width: Any = shapes[0, 1]
    rows = torch.arange(0, height, dtype=x.dtype) / height
    columns = torch.arange(0, width, dtype=x.dtype) / width
    bias = (rows[:, None] - columns[None]).flatten()
    return functional.scaled_dot_product_attention(x, x, x, attn_mask=bias[None])


def windows(x: Tensor) -> Tensor:
    """Attention within the windows of images, cut by lengths that follow from grids."""
    grids = torch.tensor([[1, 2, 2], [3, 2, 2]])
    ends = torch.repeat_interleave(grids[:, 1] * grids[:, 2], grids[:, 0]).cumsum(0)
    ends = functional.pad(ends, (1, 0))
    parts = torch.split(x, (ends[1:] - ends[:-1]).tolist(), dim=2)
    return torch.cat([functional.scaled_dot_product_attention(p, p, p) for p in parts], dim=2)


def written_to(x: Tensor) -> Tensor:
    sizes = torch.tensor([3, 5, 7])
    last = sizes[1:]
    last[0] = (x[0, 0, 0, 0] > 0).long() + 2
    return x[:, :, : sizes[1]]


class _Of(nn.Module):
    def __init__(self, code: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.code = code

    def forward(self, x: Tensor) -> Tensor:
        return self.code(x)


def captured(code: Callable[[Tensor], Tensor]) -> tuple[Captured, Tensor]:
    batch = DimSpec("batch", 2, 1, 8)
    dims = (batch, DimSpec.static(1), DimSpec.static(SIDE**2), DimSpec.static(8))
    example = torch.randn(2, 1, SIDE**2, 8, generator=torch.Generator().manual_seed(0))
    source = FactorySource(code.__name__, _Of(code).eval(), {"x": example})
    spec = InputSpec("x", "tensor", torch.float32, dims)
    return capture(source, (spec,), {"x": example}, fallback="none"), example


@pytest.mark.parametrize("code", [grid_as_mask, windows])
def test_sizes_that_are_read_out_of_constants(code: Callable[[Tensor], Tensor]) -> None:
    found, example = captured(code)
    assert (found.rungs[-1].name, found.rungs[-1].outcome) == ("bake", "taken")
    program = found.program.module()
    for x in (example, example[:1].flip(2)):
        torch.testing.assert_close(program(x=x)["output_0"], code(x))


def test_what_is_written_with_data_is_not_known() -> None:
    """The write goes through a view, and the read through the whole."""
    found, example = captured(written_to)
    program = found.program.module()
    for x in (example.abs(), -example.abs()):
        torch.testing.assert_close(program(x=x)["output_0"], written_to(x))
