"""Group norms keep their digits in ONNX."""

from pathlib import Path

import pytest
import torch
from lowering import lower, run
from programs import captured
from torch import Tensor, nn
from torch.export import Dim

CHANNELS, GROUPS = 12, 3


def distance(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("offset", [300.0])
def test_a_large_mean_does_not_cost_digits(affine: bool, offset: float, tmp_path: Path) -> None:
    norm = nn.GroupNorm(GROUPS, CHANNELS, affine=affine).eval().requires_grad_(False)
    if affine:
        norm.weight.normal_()
        norm.bias.normal_()
    dims = {0: Dim("batch", max=9), 2: Dim("height", max=99), 3: Dim("width", max=99)}
    lowered = lower(captured(norm, torch.randn(2, CHANNELS, 5, 7), dynamic=dims), tmp_path)
    assert "GroupNormalization" not in lowered.ops
    for shape in ((2, CHANNELS, 5, 7), (3, CHANNELS, 28, 17)):
        x = torch.randn(shape) + offset
        exact = norm.double()(x.double())
        eager = distance(norm.float()(x), exact)
        assert distance(run(tmp_path, x)[0], exact) <= 3 * max(eager, 2e-7)


def test_other_ranks_and_a_bias_without_weight(tmp_path: Path) -> None:
    class Plain(nn.Module):
        def forward(self, x: Tensor, bias: Tensor) -> Tensor:
            return nn.functional.group_norm(x, GROUPS, None, bias, 1e-3)

    x, bias = torch.randn(2, CHANNELS, 9), torch.randn(CHANNELS)
    lower(captured(Plain(), x, bias), tmp_path)
    torch.testing.assert_close(run(tmp_path, x, bias)[0], Plain()(x, bias))
