"""Reductions over dimensions of size 0, known and by chance, as torch computes them."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from lowering import lower, run
from programs import captured
from torch import Tensor, nn

OPS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda x: x[:, :0].sum(-1),
    "sum kept": lambda x: x[:, :0].sum(-1, keepdim=True),
    "sum of integers": lambda x: x[:, :0].long().sum(-1),
    "product": lambda x: x[:, :0].prod(-1),
    "any": lambda x: (x[:, :0] > 0).any(-1),
    "all": lambda x: (x[:, :0] > 0).all(-1),
    "norm": lambda x: x[:, :0].norm(dim=-1),
    "mean": lambda x: x[:, :0].mean(-1),
    "deviation": lambda x: x[:, :0].std(-1),
    "rows of nothing": lambda x: x[:, :0, None].expand(-1, -1, 6).sum(-1),
    "any of some": lambda x: (x[x > 1] > 3).any(),
    "all of some": lambda x: (x[x > 1] > 3).all(),
    "mean of some": lambda x: x[x > 1].mean(),
    "mean of some rows": lambda x: x[x.sum(-1) > 3].mean(0),
    "variance of some": lambda x: x[x > 1].var(),
    "some in each row": lambda x: torch.any(x[None] > 1, dim=(0, 2)),
    "some number": lambda x: (x - 1).relu().any(1),
}
NAMES = [f"out_{name}" for name in OPS]


class All(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(op(x) for op in OPS.values())


@pytest.mark.filterwarnings("ignore:.*degrees of freedom")
@pytest.mark.slow
def test_reductions_over_nothing(tmp_path: Path) -> None:
    lower(captured(All(), torch.randn(3, 8)), tmp_path, NAMES)
    for x in (torch.zeros(3, 8), torch.eye(8)[:3] * 9, torch.ones(3, 8) * 2):
        for name, found, wanted in zip(OPS, run(tmp_path, x), All()(x), strict=True):
            torch.testing.assert_close(found, wanted, equal_nan=True, msg=name)


def test_a_mean_is_no_sum_that_fp16_cannot_hold(tmp_path: Path) -> None:
    class Mean(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x[x > 1].mean()

    ops = lower(captured(Mean(), torch.randn(3, 8)), tmp_path, ["mean"]).ops
    assert "ReduceMean" in ops
    assert "ReduceSum" not in ops
