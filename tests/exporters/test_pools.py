"""Pools that ONNX has not, spelled out: windows of several sizes, divisors of one's own."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lowering import lower, run
from programs import Function, captured
from torch import Tensor
from torch.export import Dim
from torch.nn import functional as F

from enginecast.errors import LoweringError

POOLS: dict[str, tuple[Callable[..., Any], tuple[int, ...]]] = {
    "mean, 3d": (lambda x: F.adaptive_avg_pool3d(x, (3, 3, 2)), (4, 3, 5)),
    "largest, 2d": (lambda x: F.adaptive_max_pool2d(x, (3, 5), True), (8, 7)),
    "largest, 3d": (lambda x: F.adaptive_max_pool3d(x, (3, 2, 2), True), (4, 3, 5)),
    "divisor, 3d": (lambda x: F.avg_pool3d(x, (3, 2, 2), 2, 1, False, True, 5), (8, 7, 6)),
}


@pytest.mark.parametrize("way", POOLS)
def test_engines_pool_as_torch(way: str, tmp_path: Path) -> None:
    pool, sizes = POOLS[way]

    def results(x: Tensor) -> list[Tensor]:
        found = pool(x)
        return list(found) if isinstance(found, tuple) else [found]

    x = torch.randn(2, 3, *sizes)
    names = [f"out_{at}" for at in range(len(results(x)))]
    rows = {0: Dim("rows", min=1, max=9)}
    lower(captured(Function(results), x, dynamic=rows), tmp_path, names)
    holes = torch.where(x > 1, torch.nan, x)
    for given in (x, x[:1], -torch.ones_like(x), torch.cat([x, x.round()]), holes):
        for found, wanted in zip(run(tmp_path, given), results(given), strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("Conv of int32", lambda x: F.conv1d(x.int(), x[:1].int())),
        ("AveragePool of int32", lambda x: F.avg_pool1d(x.int(), 2)),
    ],
)
def test_what_onnx_has_not_of_integers_is_refused(
    name: str, module: Callable[[Tensor], Tensor], tmp_path: Path
) -> None:
    program = captured(Function(module), torch.arange(12).reshape(2, 2, 3))
    with pytest.raises(LoweringError, match=f"ONNX has no {name}"):
        lower(program, tmp_path)
