"""Mixtures of experts lower to one product for each expert."""

from pathlib import Path

import pytest
import torch
import transformers.integrations.moe  # noqa: F401 - registers grouped_mm_fallback
from lowering import engine_of
from torch import Tensor, nn

EXPERTS, WIDTH, OUT = 5, 12, 20


class Experts(nn.Module):
    """Rows sorted by expert, times the weights of their expert."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, OUT, WIDTH))

    def forward(self, rows: Tensor, ends: Tensor) -> Tensor:
        weight = self.weight.transpose(-2, -1)
        found: Tensor = torch.ops.transformers.grouped_mm_fallback(rows, weight, ends)
        return found


@pytest.mark.parametrize("counts", [(2, 1, 4, 1, 1), (0, 9, 0, 0, 0), (0, 0, 3, 0, 6)])
def test_rows_meet_the_weights_of_their_expert(counts: tuple[int, ...], tmp_path: Path) -> None:
    module = Experts().eval().requires_grad_(False)
    rows, ends = torch.randn(sum(counts), WIDTH), torch.tensor(counts).cumsum(0)
    found, lowered = engine_of(module, tmp_path, rows, ends)
    torch.testing.assert_close(found, module(rows, ends))
    assert lowered.ops["MatMul"] == EXPERTS
