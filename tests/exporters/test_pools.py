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


def test_a_convolution_of_one_volume_without_a_batch(tmp_path: Path) -> None:
    x, weight = torch.randn(6, 4, 3, 5), torch.randn(4, 3, 2, 3, 3)
    conv = Function(lambda x, w: F.conv3d(x, w, stride=2, padding=1, groups=2))
    lower(captured(conv, x, weight), tmp_path)
    torch.testing.assert_close(run(tmp_path, x, weight)[0], conv(x, weight), rtol=1e-5, atol=1e-5)


def test_products_of_narrow_integers_wrap_around(tmp_path: Path) -> None:
    x = torch.arange(-128, 128, 5).to(torch.int8)[:48].reshape(6, 8)
    product = Function(
        lambda x: (x @ x.t(), x.to(torch.uint8) @ x.t().to(torch.uint8), -x.to(torch.uint8))
    )
    lower(captured(product, x), tmp_path, ["signed", "unsigned", "negated"])
    for found, wanted in zip(run(tmp_path, x), product(x), strict=True):
        assert found.dtype == wanted.dtype
        assert torch.equal(found, wanted)


def test_the_largest_of_int32(tmp_path: Path) -> None:
    x = torch.randint(-(2**31), 2**31, (2, 3, 6, 6)).to(torch.int32)
    pool = Function(lambda x: F.max_pool2d(x, 3, 2, 1))
    lower(captured(pool, x), tmp_path)
    assert torch.equal(run(tmp_path, x)[0], pool(x))


@pytest.mark.parametrize("sizes", [(2, 3, 7, 8), (3, 4, 5, 6)])
def test_places_of_the_largest_are_those_of_the_last_nan(
    sizes: tuple[int, ...], tmp_path: Path
) -> None:
    pools = {2: lambda x: F.max_pool2d(x, 3, 2, 1, return_indices=True)}
    pools[3] = lambda x: F.max_pool3d(x, 2, 2, 1, return_indices=True)
    x = torch.randn(sizes)
    pool = Function(pools[2 if sizes[0] == 2 else 3])
    lower(captured(pool, x), tmp_path, ["largest", "places"])
    for given in (x, torch.where(x > 0, torch.nan, x), torch.full_like(x, torch.nan)):
        for found, wanted in zip(run(tmp_path, given), pool(given), strict=True):
            torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)


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
