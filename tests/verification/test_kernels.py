"""What kernels that add may lose is measured by their terms, not by a result that may be small."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from enginecast.verification.eager.kernel_noise import UNIT, noisy_outputs

WEIGHT = torch.randn(64, generator=torch.Generator().manual_seed(1))
FUNCTIONS: dict[str, Callable[[Tensor], Any]] = {
    "mean": lambda x: x.mean(-1),
    "std and mean": lambda x: torch.std_mean(x, -1)[1],
    "average pool": lambda x: torch.nn.functional.avg_pool1d(x, 64),
    "einsum": lambda x: torch.einsum("bi,i->b", x, WEIGHT),
    "product with a vector": lambda x: torch.mv(x, WEIGHT),
    "linear interpolation": lambda x: torch.lerp(x, -x, 0.49),
}


class Of(nn.Module):
    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"y": self.function(x)}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_noise_is_that_of_the_terms(name: str) -> None:
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))
    x[:, 1:] -= x[:, 1:].mean(-1, keepdim=True)
    x[:, 0] = 1e-4  # the mean is small beside what is added
    program = torch.export.export(Of(FUNCTIONS[name]), (x,))
    samples = [run[0]["y"] for run in noisy_outputs(program, [{"x": x}], ["y"])]
    noise = (torch.stack(samples) - FUNCTIONS[name](x)).abs().mean() / UNIT
    terms = {"einsum": 8.0, "product with a vector": 8.0, "linear interpolation": 1.0}
    assert 0.2 * terms.get(name, 1 / 8) < noise < 6 * terms.get(name, 1 / 8)
