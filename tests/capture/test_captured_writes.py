"""What torch.export does not see, or captures as its own graph: `.data`, regions of autocast."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_leaves

from enginecast.capture.inputs.examples import example_sizes, sample
from enginecast.capture.sources.open_source import open_source
from enginecast.capture.tracing.captured import Captured, capture, describe
from enginecast.compiler.prepare.open_model import input_specs
from enginecast.compiler.prepare.program import prepare
from enginecast.compiler.prepare.reference import reference_of
from enginecast.compiler.request import ModelOptions
from enginecast.compiler.steps import Steps
from enginecast.errors import CaptureError
from enginecast.passes.ir.edit import dtype_of


class Model(nn.Module):
    linear: nn.Linear
    seen: list[Tensor]

    def __init__(self, function: "Function") -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.function = function

    def forward(self, x: Tensor) -> object:
        return self.function(self, x)


Function = Callable[[Model, Tensor], object]


def captured(module: nn.Module) -> Captured:
    source = open_source(module.eval(), example={"x": torch.randn(3, 8)})
    specs = input_specs(source, None, ()).specs
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


def copies_numbers(_: Model, x: Tensor) -> Tensor:
    y = x * 2
    whole = torch.arange(8)
    numbers: list[Any] = [5, x.shape[0], 2.7]  # torch's types have tensors alone
    y[:, 1].copy_(numbers[0])
    y[:, 2].copy_(numbers[1], non_blocking=True)
    whole[3].copy_(numbers[2])
    return y + whole


@pytest.mark.parametrize("function", [written, switched_off, casts_nothing, copies_numbers])
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


def sparse(_: Model, x: Tensor) -> Tensor:
    return x.to_sparse().to_dense()


def backward(self: Model, x: Tensor) -> Tensor:
    with torch.enable_grad():
        y = x.detach().requires_grad_(True)
        return torch.autograd.grad(self.linear(y).square().sum(), y)[0]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (sets, "forward sets the data of a tensor at .*test_captured_writes.py:"),
        (sparse, "forward makes a sparse or quantized tensor"),
        (backward, "torch.export does not see how the model makes a tensor that it reads"),
    ],
)
def test_what_cannot_be_is_refused_at_its_line(function: Function, message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        captured(Model(function))


def test_autocast_is_off_and_what_it_would_cast_is_known() -> None:
    found = captured(Model(halves))
    assert {dtype for n in found.program.graph.nodes if (dtype := dtype_of(n))} == {torch.float32}
    (region,) = found.autocast
    assert region.startswith("bfloat16 at test_captured_writes.py:")
    program = torch.export.export(Model(halves).eval(), (torch.randn(3, 8),))
    with pytest.raises(CaptureError, match="in bfloat16 within torch"):
        describe(program)
    source = open_source(Model(halves).eval(), example={"x": torch.randn(3, 8)})
    ready = prepare(source, ModelOptions(), Steps())
    with pytest.raises(CaptureError, match=r"in bfloat16 within torch.autocast at .* fp32 engine"):
        reference_of(ready, "fp32")


class Statistics(nn.Module):
    """A norm that takes the statistics of what it reads, and mixes them into others."""

    mean: Tensor
    spread: Tensor

    def __init__(self, norm: Callable[..., Tensor], *, is_state: bool = False) -> None:
        super().__init__()
        self.norm, self.is_state = norm, is_state
        self.register_buffer("mean", torch.full((8,), 2.0))
        self.register_buffer("spread", torch.full((8,), 3.0))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        mean, spread = self.mean, self.spread
        if not self.is_state:
            mean, spread = mean.clone(), spread.clone()
        read = x if self.norm is functional.batch_norm else x[:, :, None] * torch.arange(4.0)
        return self.norm(read, mean, spread, None, None, True, 0.3), mean * 1, spread * 1


NORMS = (functional.batch_norm, functional.instance_norm)


@pytest.mark.parametrize("norm", NORMS)
def test_what_a_norm_keeps_is_written(norm: Callable[..., Tensor]) -> None:
    module = Statistics(norm)
    program = captured(module).program
    named = [n for n in program.graph.nodes if "_norm" in str(n.target)]
    assert [node.args[3:5] for node in named] == [(None, None)]
    x = torch.randn(3, 8)
    for found, wanted in zip(tree_leaves(program.module()(x=x)), module(x), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)
