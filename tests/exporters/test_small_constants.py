"""Constants that are small, or near 0 or 1, stay in the engine as they are."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from enginecast.api import compile as export
from enginecast.runtime.load import load


class Of(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def accumulated(x: Tensor) -> Tensor:
    whole = torch.ones(3, 8) * x.mean()
    return whole.index_put((torch.tensor([0, 1, 2]),), x.std() * torch.ones(3, 8), accumulate=True)


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "pixel-norm": lambda x: x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-8),
    "log": lambda x: torch.log(torch.relu(x) + 1e-10),
    "norm": lambda x: x / (x.norm(dim=-1, keepdim=True) + 1e-8),
    "std": lambda x: x / (x.std(-1, keepdim=True) + 1e-8),
    "difference": lambda x: torch.reciprocal(x - 1e-9),
    "factor": lambda x: (x * (1 + 4e-6) - x) * 1e5,
    "divisor": lambda x: (x / (1 + 4e-6) - x) * 1e5,
    "normalize": lambda x: functional.normalize(x, dim=-1, eps=1e-12),
    "accumulate": accumulated,
}


QUICK = ("norm", "factor", "accumulate")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in FUNCTIONS]
)
def test_constants_reach_the_engine(name: str, tmp_path: Path) -> None:
    module = Of(FUNCTIONS[name])
    bundle = export(module, tmp_path / "bundle", example={"x": torch.randn(4, 8)})
    for scale in (0.0, 1e-9, 1.0):
        x = torch.randn(4, 8) * scale
        expected = module(x)
        with load(bundle.root) as engine:
            [found] = engine.run({"x": x.numpy()}, check_finite=False).values()
        np.testing.assert_allclose(found, expected, rtol=2e-3, atol=1e-7)
