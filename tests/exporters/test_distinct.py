"""Counts of equal elements: distinct ones, and runs of them; rounded decimals."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from lowering import lower, run
from programs import Function, captured
from torch import Tensor
from torch.export import Dim

NAN, MOST = torch.nan, 2**31 - 1
ROWS = torch.tensor([[3.0, NAN, 1.0, 3.0], [NAN, NAN, -2.0, 1.0], [1.0, 1.0, 3.0, 3.0]])
WAYS: dict[str, Callable[[Tensor], tuple[Tensor, ...]]] = {
    "unique": lambda x: torch.unique(x, return_inverse=True, return_counts=True),
    "runs": lambda x: torch.unique_consecutive(x, return_inverse=True, return_counts=True),
}


@pytest.mark.parametrize("way", WAYS)
def test_equal_elements_are_counted_as_by_torch(way: str, tmp_path: Path) -> None:
    module = Function(WAYS[way])
    program = captured(module, ROWS, dynamic={0: Dim("rows", min=1, max=9)})
    lower(program, tmp_path, [f"out_{at}" for at in range(len(module(ROWS)))])
    for given in (ROWS, ROWS.nan_to_num(4), ROWS[:1], torch.full((2, 4), MOST).float()):
        for found, wanted in zip(run(tmp_path, given), module(given), strict=True):
            torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)
