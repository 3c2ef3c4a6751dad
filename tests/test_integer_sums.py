"""Sums of integers past 2**53, as in hashes: exact, and wrapping around as torch's do."""

from pathlib import Path

import torch
from lowering import lower, run
from programs import captured
from torch import Tensor, nn


class Hash(nn.Module):
    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        powers = torch.tensor(5915587277) ** torch.arange(4)
        apart = ids[:, :, None] * powers
        return apart.sum(-1), apart.transpose(0, 1).sum((0, 2), keepdim=True) % 64


def test_sums_of_products_wrap_around(tmp_path: Path) -> None:
    ids = torch.randint(-255, 255, (3, 7), generator=torch.Generator().manual_seed(0))
    lower(captured(Hash(), ids), tmp_path, ["hashes", "buckets"])
    for found, wanted in zip(run(tmp_path, ids), Hash()(ids), strict=True):
        assert torch.equal(found, wanted)
