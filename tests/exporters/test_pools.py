"""Pools that torch.onnx has not."""

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
    "mean, 3d": (lambda x: F.adaptive_avg_pool3d(x, (2, 3, 1)), (4, 3, 5)),
    "largest, 1d": (lambda x: F.adaptive_max_pool1d(x, 4, True), (8,)),
    "largest, 2d": (lambda x: F.adaptive_max_pool2d(x, (4, 1), True), (8, 7)),
    "largest, 3d": (lambda x: F.adaptive_max_pool3d(x, (2, 1, 5), True), (4, 3, 5)),
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
    ("reason", "module"),
    [
        ("its windows differ in size", lambda x: F.adaptive_max_pool2d(x, (3, 4))),
        ("its windows differ in size", lambda x: F.adaptive_avg_pool3d(x, (2, 2, 2))),
        ("no divisor of one's own", lambda x: F.avg_pool2d(x, 2, divisor_override=3)),
    ],
)
def test_pools_that_onnx_has_not_are_refused(
    reason: str, module: Callable[[Tensor], Tensor], tmp_path: Path
) -> None:
    program = captured(Function(module), torch.randn(2, 4, 8, 7))
    with pytest.raises(LoweringError, match=reason):
        lower(program, tmp_path)


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
