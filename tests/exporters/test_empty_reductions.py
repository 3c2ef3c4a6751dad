"""Reductions over dimensions of size 0, known and by chance, as torch computes them."""

from pathlib import Path

import torch
from lowering import lower
from programs import captured
from torch import Tensor, nn


def test_a_mean_is_no_sum_that_fp16_cannot_hold(tmp_path: Path) -> None:
    class Mean(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x[x > 1].mean()

    ops = lower(captured(Mean(), torch.randn(3, 8)), tmp_path, ["mean"]).ops
    assert "ReduceMean" in ops
    assert "ReduceSum" not in ops
