"""Measured gains in plans, with a clock of our own; and what would be timed on a GPU."""

import pytest
import torch
from programs import TOKENS, captured
from torch import Tensor, nn
from torch.export import ExportedProgram

from enginecast.passes.ir.base import PassContext
from enginecast.passes.ir.quantization_plan import LayerPlan
from enginecast.passes.quantize.plan.layer_timing import (
    Product,
)
from enginecast.passes.quantize.plan.options import PlanOptions
from enginecast.passes.quantize.plan.planning import make_plan

OPTIONS = PlanOptions(format="fp8", arch="sm90", heads=True, max_error=9)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(32, 64)
        self.again = nn.Linear(64, 32)
        self.up_too = nn.Linear(32, 64)
        self.pooled = nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        found = self.up_too(self.again(self.up(x)))
        pooled: Tensor = self.pooled(found.mean(1))
        return pooled


@pytest.fixture(scope="module")
def net() -> ExportedProgram:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return captured(Net().requires_grad_(False), torch.randn(2, 5, 32), dynamic=TOKENS)


class Clock:
    """A gain of n / 40; remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[Product] = []

    def __call__(self, product: Product) -> tuple[float, float]:
        self.asked.append(product)
        return product.n / 40, 1.0


def planned(program: ExportedProgram, clock: Clock, options: PlanOptions) -> list[LayerPlan]:
    cases = ({"x": torch.randn(1, 3, 32)}, {"x": torch.randn(4, 7, 32)})
    return list(make_plan(program, PassContext(calibration=cases), options, clock).layers)


def test_measured_gains_replace_the_model_and_each_size_is_timed_once(
    net: ExportedProgram,
) -> None:
    clock = Clock()
    up, again, up_too, pooled = planned(net, clock, OPTIONS)
    assert clock.asked == [
        Product(28, 64, 32, True, False, "sm90"),
        Product(28, 32, 64, True, False, "sm90"),
        Product(4, 16, 64, True, False, "sm90"),
    ]
    assert (up.choice, up.gain, up.gain_from) == ("w8a8-dynamic", 1.6, "measured")
    assert (up_too.gain, up_too.gain_from) == (1.6, "measured")
    assert (again.choice, again.reason) == ("keep", "does not pay: its gain was measured as 0.8")
    assert pooled.reason == "does not pay: its gain was measured as 0.4"
