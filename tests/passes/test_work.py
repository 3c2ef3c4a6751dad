"""What one run of a program takes, counted without a run."""

import torch
from torch import Tensor, nn
from torch.export import Dim, export

from enginecast.passes.analyses.work import Work, work_of


class Decoder(nn.Module):
    """A convolution at every place of an image that is four times as large as the input."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 5, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.conv(torch.cat([torch.cat([x, x], 2)] * 2, 3))
        return found


class Reads(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[x > 0] * 2


def test_a_convolution_counts_at_every_place_of_the_size_asked_for() -> None:
    height = Dim("height", min=2, max=4096)
    shapes = {"x": {2: height}}
    program = export(Decoder(), (torch.zeros(1, 3, 4, 4),), dynamic_shapes=shapes)
    places = 2 * 1024 * 2 * 4
    found = work_of(program, {"x": torch.zeros(1, 3, 1024, 4, device="meta")})
    assert found == Work(places * 5 * 3 * 3 * 3, places * (3 + 5))


def test_what_values_decide_is_not_known() -> None:
    program = export(Reads(), (torch.ones(4),))
    assert work_of(program, {"x": torch.zeros(4)}) is None
