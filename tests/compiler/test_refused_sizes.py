"""Sizes that eager itself refuses are left out of the ranges."""

import torch
from torch import Tensor, nn

from enginecast.capture.inputs.specs import DimSpec, InputSpec
from enginecast.capture.outputs.flatten import ALL
from enginecast.capture.sources.factory import FactorySource
from enginecast.capture.tracing.captured import capture
from enginecast.compiler.judge_sizes import leave_out_refused


class Normalized(nn.Module):
    """Wants more than one value in a channel, which the smallest sizes together do not give."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        wanted: Tensor = self.norm(nn.functional.avg_pool2d(x, 8))
        return wanted


def test_the_smallest_sizes_that_eager_refuses_are_left_out() -> None:
    dims = (
        *(DimSpec("batch", 2, 1, 8), DimSpec.static(3)),
        *(DimSpec("height", 24, 8, 64), DimSpec("width", 24, 8, 24)),
    )
    example = {"x": torch.randn(2, 3, 24, 24)}
    source = FactorySource("normalized", Normalized().eval(), example)
    specs = (InputSpec("x", "image", torch.float32, dims),)
    found = leave_out_refused(source, capture(source, specs, example), ALL)
    ranges = {dim.name: (dim.minimum, dim.maximum) for dim in found.inputs[0].dims if dim.name}
    assert ranges == {"batch": (1, 8), "height": (16, 64), "width": (8, 24)}
    assert "height takes 16..64, not 8..64" in found.notes[-1]
    torch.manual_seed(0)
    with torch.no_grad():
        Normalized()(torch.randn(1, 3, 16, 8))
