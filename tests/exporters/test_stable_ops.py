"""Ops that the plain ONNX form of is wrong at the edges: tiny, large and integral values, ties."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from lowering import lower, run
from programs import captured
from torch import Tensor, nn
from torch.nn import functional

PLACES = torch.tensor([[3, 5, 3, 0], [1, 1, 1, 2]])
OPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "log1p": lambda x, y: torch.log1p(x),
    "expm1": lambda x, y: torch.expm1(x),
    "elu": lambda x, y: functional.elu(x, 1.5),
    "celu": lambda x, y: functional.celu(x, 0.5),
    "selu": lambda x, y: functional.selu(x),
    "logsigmoid": lambda x, y: functional.logsigmoid(x),
    "bce": lambda x, y: functional.binary_cross_entropy_with_logits(
        x, (y > 0).float(), pos_weight=torch.tensor(3.0), reduction="none"
    ),
    "logaddexp": torch.logaddexp,
    "atan2": torch.atan2,
    "hypot": torch.hypot,
    "cube-integers": lambda x, y: (x.long() ** 3).float(),
    "clamp-integers": lambda x, y: (x.long() * 3037000501).clamp(min=0).float(),
    "unique-bytes": lambda x, y: torch.unique(x.abs().byte() % 3, return_inverse=True)[1].float(),
    "angle": lambda x, y: torch.angle(x / (y > 0)),
    "angle-integers": lambda x, y: torch.angle(x.long()),
    "compare-booleans": lambda x, y: (((x > 0) > (y > 0)) | ((x > 1) <= (y > 1))).float(),
    "gradient-integers": lambda x, y: torch.gradient((x * 3).long())[1],
    "cumsum": lambda x, y: torch.cumsum(x.flatten(), 0),
    "cumsum-half": lambda x, y: torch.cumsum(x.half(), 0).float(),
    "square-booleans": lambda x, y: torch.square(x > 0).float(),
    "power-booleans": lambda x, y: ((x > 0) ** 3).float(),
    "finite-integers": lambda x, y: torch.isfinite(x.long()).float(),
    "finite-booleans": lambda x, y: torch.isfinite(x > 0).float(),
    "finite": lambda x, y: torch.isfinite(x / (y > 0)).float(),
    "shift-left": lambda x, y: (x.int() << (y.int() % 40 - 3)).float(),
    "shift-right": lambda x, y: (x.long() >> (y.long() % 70 - 3)).float(),
    "shift-bytes": lambda x, y: (x.abs().byte() << (y.abs().byte() % 11)).float(),
    "shift-bytes-right": lambda x, y: (x.abs().byte() >> 2).float(),
    "shift-number": lambda x, y: (x.int() << 33).float(),
    "cumprod": lambda x, y: torch.cumprod(x.sign() * x.abs().clamp(0.5, 2), -1),
    "stable-sort": lambda x, y: torch.sort(x, stable=True, descending=True).indices.float(),
    "diagonal": lambda x, y: torch.diagonal(x / (y > 0), 1),
    "put": lambda x, y: torch.put(x, torch.tensor([3, 0, -1]), y[:3, 0]),
    "scatter-of-more": lambda x, y: x.scatter(1, PLACES, y).scatter_add(0, PLACES, y),
    "scatter-mean": lambda x, y: x.scatter_reduce(1, PLACES, y, "mean"),
    "scatter-mean-alone": lambda x, y: x.scatter_reduce(0, PLACES, y, "mean", include_self=False),
    "scatter-mean-integers": lambda x, y: (
        (x.abs().long() * 2 - 9).scatter_reduce(0, PLACES, -y.abs().long() % 7, "mean").float()
    ),
    "scatter-largest": lambda x, y: (x / (y > 0)).scatter_reduce(
        1, PLACES, (y / (x > 0)).nan_to_num(0, 9), "amax", include_self=False
    ),
    "scatter-booleans": lambda x, y: (
        (x > 0)
        .scatter_reduce(0, PLACES, y > 0, "amin")
        .scatter_reduce(1, PLACES, y < 0, "amax", include_self=False)
        .float()
    ),
    "diagonal-of-bytes": lambda x, y: torch.diagonal_copy(x.abs().byte(), -1).float(),
    "hardtanh-integers": lambda x, y: functional.hardtanh(x.long() * 3, -2.5, 2.5).float(),
    "amax": lambda x, y: (x / (y > 0)).amax(0),
    "amax-of-all": lambda x, y: torch.stack([x.amax(), x.max(), x.amin(), (x / (y > 0)).min()]),
    "max-place": lambda x, y: (x / (y > 0)).max(0).indices.float(),
    "floor-divide": lambda x, y: x // 0.1,
    "floor-divide-tensor": lambda x, y: x // y,
    "floor-divide-infinity": lambda x, y: x // (y / (y > 0)).nan_to_num(0.3, torch.inf),
    "div-floor": lambda x, y: torch.div(x, 0.3, rounding_mode="floor"),
    "div-trunc": lambda x, y: torch.div(x, 0.3, rounding_mode="trunc"),
    "div-integers": lambda x, y: torch.div(x.long(), 3, rounding_mode="floor").float(),
    "trunc-integers": lambda x, y: torch.div(x.long(), 3, rounding_mode="trunc").float(),
    "floor-divide-bytes": lambda x, y: ((x * 100).clamp(-128, 127).char() // 3).float(),
    "remainder-integers": lambda x, y: (x.long() % -3).float(),
    "remainder": lambda x, y: x % 0.1,
    "remainder-negative": lambda x, y: x % -0.7,
    "remainder-tensor": torch.remainder,
    "floor-divide-half": lambda x, y: (x.half() // 0.3).float(),
    "sinc-half": lambda x, y: torch.sinc(x.half()).float(),
    "remainder-half": lambda x, y: (x.half() % 0.3).float(),
    "numbers-beside-double": lambda x, y: (
        (0.1 / x.double() - x.double() * 0.1 + 0.7).masked_fill(y > 0, 0.3)
        - torch.full_like(y, 0.9, dtype=torch.float64)
        - 10.0 * (0.1 * (x.double() > 0.1))
    ),
    "bce-double": lambda x, y: functional.binary_cross_entropy_with_logits(x, (y > 0).double()),
}

NAMES = tuple(f"out_{name}" for name in OPS)


class All(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        return tuple(op(x, y) for op in OPS.values())


INPUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "normal": lambda v: v,
    "tiny": lambda v: v * 1e-4,
    "axes": lambda v: torch.tensor([-1.0, -0.0, 0.0, 1.0]).repeat(v.numel() // 4).view_as(v),
}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stable")
    lower(captured(All(), torch.randn(16, 16), torch.randn(16, 16)), folder, NAMES)
    return folder


@pytest.mark.parametrize("values", INPUTS)
def test_engines_agree_with_torch_element_by_element(values: str, engine: Path) -> None:
    torch.manual_seed(2)
    x = INPUTS[values](torch.randn(16, 16))
    y = x.flip(-1).roll(1, 0) if values == "axes" else INPUTS[values](torch.randn(16, 16))
    least = 1e-30 if values == "tiny" else 2e-8  # what a sum of numbers near 1 leaves
    for name, found, expected in zip(OPS, run(engine, x, y), All()(x, y), strict=True):
        rounds = 5e-3 if name.endswith("-half") else 3e-6
        if name == "numbers-beside-double":
            rounds = 1e-14
        np.testing.assert_allclose(found, expected, rtol=rounds, atol=least, err_msg=name)
