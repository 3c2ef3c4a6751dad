"""What code computes from sizes is computed in an engine, for each size."""

from pathlib import Path

import torch
from lowering import lower, run
from torch import Tensor, nn

LENGTHS = (1, 2, 3, 7, 8, 9, 16, 33)


class Computes(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        n = x.shape[0]
        return (
            x / torch.sym_sqrt(n),
            x * torch.sym_int(torch.sym_sqrt(n)),
            x * round(n / 3),
            x * round(n / 2),
            x * (n << 2),
            x * (n >> 1),
            x * ((n - 5) >> 1),
            x * (n & 5),
            x * (n | 5),
        )


def test_sizes_in_numbers(tmp_path: Path) -> None:
    length = torch.export.Dim("length", min=1, max=64)
    inputs = (torch.randn(4, 2, generator=torch.Generator().manual_seed(0)),)
    program = torch.export.export(Computes(), inputs, dynamic_shapes=({0: length},))
    lower(program, tmp_path, [f"out_{place}" for place in range(9)])
    for size in LENGTHS:
        x = torch.arange(1.0, 2 * size + 1).view(size, 2)
        for place, (found, wanted) in enumerate(zip(run(tmp_path, x), Computes()(x), strict=True)):
            torch.testing.assert_close(found, wanted, msg=f"output {place} of length {size}")


class Clamps(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        n = x.shape[0]
        return x.clamp(0, n - 2), x.clamp(n - 9, 3.5), x.clamp(min=n - 3, max=n), x.clamp(max=n - 3)


def test_sizes_as_bounds(tmp_path: Path) -> None:
    """As boxes are cut to the size of an image; where the bounds cross, the upper one counts."""
    length = torch.export.Dim("length", min=1, max=64)
    inputs = (torch.randn(4, 2, generator=torch.Generator().manual_seed(0)),)
    program = torch.export.export(Clamps(), inputs, dynamic_shapes=({0: length},))
    lower(program, tmp_path, [f"out_{place}" for place in range(4)])
    for size in LENGTHS:
        x = torch.linspace(-3.0, 2 * size, 2 * size).view(size, 2)
        for place, (found, wanted) in enumerate(zip(run(tmp_path, x), Clamps()(x), strict=True)):
            torch.testing.assert_close(found, wanted, msg=f"output {place} of length {size}")
