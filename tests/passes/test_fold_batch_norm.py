"""fold-batch-norm: one convolution for a convolution and its norm, and norms that must stay."""

from collections.abc import Callable
from typing import Any

import golden
import pytest
import torch
from programs import captured, count, ir_diff, outputs, reasons, relative_error, rewritten
from torch import Tensor, nn

from enginecast.passes.ir.source import layer_path, module_path

aten = torch.ops.aten


def filled(module: nn.Module) -> nn.Module:
    """With statistics that a norm of ones and zeros would not have."""
    torch.manual_seed(1)
    for part in module.modules():
        if isinstance(part, nn.modules.batchnorm._BatchNorm) and part.running_mean is not None:
            assert part.running_var is not None
            part.running_mean.normal_()
            part.running_var.uniform_(0.5, 2)
            if part.affine:
                part.weight.data.uniform_(-2, 2)
                part.bias.data.normal_()
    return module.eval().requires_grad_(False)


class Net(nn.Module):
    def __init__(self, function: Callable[..., Any], bias: bool = True) -> None:
        super().__init__()
        self.function = function
        self.conv = nn.Conv2d(4, 6, 3, bias=bias)
        self.norm, self.plain = nn.BatchNorm2d(6), nn.BatchNorm2d(6, affine=False)

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


pytestmark = pytest.mark.filterwarnings("ignore:Using padding")
X = torch.randn(2, 4, 7, 7, generator=torch.Generator().manual_seed(0))


def test_one_convolution_is_left() -> None:
    before = captured(filled(Net(lambda n, x: n.norm(n.conv(x)))), X)
    after, sites = rewritten(before, "fold-batch-norm")
    assert [site.reason for site in sites] == [""]
    assert count(after, "batch_norm") == 0
    (wanted,), (found,) = outputs(before, X), outputs(after, X)
    assert relative_error(found, wanted) < 1e-6
    (conv,) = [node for node in after.graph.nodes if node.target is aten.conv2d.default]
    assert (module_path(conv), layer_path(conv)) == ("norm", "conv")
    golden.check("fold_batch_norm.diff", ir_diff(before, after))


@pytest.mark.parametrize(
    "module",
    [
        Net(lambda n, x: n.norm(n.conv(x)), bias=False),
        Net(lambda n, x: n.plain(n.conv(x))),
        nn.Sequential(nn.Conv2d(4, 6, 2, padding="same", groups=2), nn.BatchNorm2d(6)),
        nn.Sequential(nn.ConvTranspose2d(4, 6, 2, 2, bias=False), nn.BatchNorm2d(6)),
        nn.Sequential(nn.ConvTranspose2d(4, 6, 3, 2, groups=2), nn.BatchNorm2d(6)),
    ],
)
def test_other_forms(module: nn.Module) -> None:
    before = captured(filled(module), X)
    after, _ = rewritten(before, "fold-batch-norm")
    assert count(after, "batch_norm") == 0
    assert relative_error(outputs(after, X)[0], outputs(before, X)[0]) < 1e-6


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda n, x: n.norm(n.conv(x).relu()), "it does not follow a convolution"),
        (lambda n, x: (y := n.conv(x), n.norm(y))[1] + y, "something else reads the convolution"),
        (
            lambda n, x: nn.functional.batch_norm(n.conv(x), None, None, training=True),
            "it computes statistics",
        ),
        (
            lambda n, x: nn.functional.batch_norm(
                n.conv(x), n.norm.running_mean, x[0, 0, 0, :6].abs() + 1
            ),
            "a weight is computed from an input",
        ),
    ],
)
def test_norms_that_stay(function: Callable[..., Any], reason: str) -> None:
    before = captured(filled(Net(function)), X)
    after, sites = rewritten(before, "fold-batch-norm")
    assert count(after, "batch_norm") == 1
    assert any(reason in found for found in reasons(sites))
