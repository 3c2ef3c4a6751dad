"""Resizes by a factor that leaves some sizes as they are."""

from pathlib import Path

import torch
from lowering import lower, run
from programs import captured
from torch import Tensor, nn
from torch.export import Dim
from torch.nn.functional import interpolate

WAYS = ("nearest", "linear", "bilinear", "bicubic", "nearest, 2d", "nearest, 3d", "doubled")


class Resized(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        picture, volume = x[:, :, None] + x[..., None], x[:, :, None, None].expand(-1, -1, 2, 2, -1)
        return (
            interpolate(x, scale_factor=1.3),
            interpolate(x, scale_factor=1.1, mode="linear"),
            interpolate(picture, scale_factor=(1.3, 1.7), mode="bilinear"),
            interpolate(picture, scale_factor=1.1, mode="bicubic"),
            interpolate(picture, scale_factor=(1.2, 1.0)),
            interpolate(volume.contiguous(), scale_factor=1.4),
            interpolate(picture, scale_factor=2.3),
        )


def test_engines_resize_as_torch_at_sizes_that_stay(tmp_path: Path) -> None:
    module, size = Resized(), Dim("size", min=1, max=32)
    names = [f"out_{at}" for at in range(len(WAYS))]
    lower(captured(module, torch.randn(1, 3, 6), dynamic={2: size}), tmp_path, names)
    for length in range(1, 13):
        x = torch.randn(1, 3, length, generator=torch.Generator().manual_seed(length))
        for way, found, wanted in zip(WAYS, run(tmp_path, x), module(x), strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5, msg=f"{way}, {length}")
