"""What torch.export does not see, or captures as its own graph: `.data`, regions of autocast."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from enginecast.capture.inputs.examples import example_sizes, sample
from enginecast.capture.sources.source import open_source
from enginecast.capture.tracing.export import Captured, capture
from enginecast.compiler.prepare import input_specs
from enginecast.errors import CaptureError


class Model(nn.Module):
    linear: nn.Linear

    def __init__(self, function: "Function") -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.function = function

    def forward(self, x: Tensor) -> object:
        return self.function(self, x)


Function = Callable[[Model, Tensor], object]


def captured(module: nn.Module) -> Captured:
    source = open_source(module.eval(), example={"x": torch.randn(3, 8)})
    specs, _ = input_specs(source, None, ())
    return capture(source, specs, sample(specs, example_sizes(specs), 0))


def written(_: Model, x: Tensor) -> Tensor:
    y = x * 2
    y.data.add_(1)
    y.data[:, 0] = 7
    return y + x.data


def switched_off(self: Model, x: Tensor) -> tuple[Tensor, ...]:
    y = x * 2
    with torch.autocast("cpu", enabled=False):
        y[:, 0] = self.linear(x)[:, 1]
        with torch.autocast("cpu", enabled=False):
            z = torch.cond(x.sum() > 0, torch.exp, torch.cos, (y,))
    return y * 2, z, y


def casts_nothing(_: Model, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return x * 2 + 1


@pytest.mark.parametrize("function", [written, switched_off, casts_nothing])
def test_it_is_captured_as_eager_runs_it(
    function: Function, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = Model(function)
    program = captured(module).program
    x = torch.randn(5, 8)
    with torch.no_grad(), monkeypatch.context() as patch:
        patch.setattr(torch, "cond", lambda p, one, other, xs: (one if p else other)(*xs))
        expected = module(x)
        found = program.module()(x=x)
    expected = expected if isinstance(expected, tuple) else (expected,)
    torch.testing.assert_close(tuple(found.values()), expected)


def sets(_: Model, x: Tensor) -> Tensor:
    y = x * 2
    y.data = y + 1
    return y


def halves(self: Model, x: Tensor) -> object:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return self.linear(x).float()


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (sets, "forward sets the data of a tensor at .*test_captured_writes.py:"),
        (halves, "forward computes in bfloat16 within torch.autocast at test_captured_writes.py:"),
    ],
)
def test_what_cannot_be_is_refused_at_its_line(function: Function, message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        captured(Model(function))
