"""Sizes that vary: in branches whose paths return other strides, in recurrent layers, pools and
caches, and where code rounds a quotient of sizes.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from enginecast.capture.inputs.examples import example_sizes, sample
from enginecast.capture.sources.open_source import open_source
from enginecast.capture.tracing.captured import Captured, capture
from enginecast.compiler.export.session import export
from enginecast.compiler.prepare.open_model import input_specs
from enginecast.compiler.request import ExportRequest, ModelOptions
from enginecast.errors import CaptureError
from enginecast.passes.ir.blocks import all_nodes

LENGTHS = (1, 2, 7, 8, 9, 16, 64)


def captured(module: nn.Module, *dynamic: str, **example: Tensor) -> Captured:
    source = open_source(module, example=example)
    specs = input_specs(source, None, dynamic).specs
    return capture(source, specs, sample(specs, example_sizes(specs), 0), fallback="rewrite")


def check(found: Captured, module: nn.Module, **inputs: Tensor) -> None:
    program = found.program.module(check_guards=False)
    with torch.no_grad():
        wanted, got = module(**inputs), list(program(**inputs).values())
    for one, other in zip(wanted if isinstance(wanted, tuple) else (wanted,), got, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-6)


class Nested(nn.Module):
    """A branch on values in one on sizes."""

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] > 8:
            y = x.transpose(1, 2) if x.sum() > 0 else (x * 2 + 1).flip(1).transpose(1, 2)
        else:
            y = x.mean(1, keepdim=True).expand(-1, x.shape[1], -1).transpose(1, 2)
        return y


@pytest.mark.parametrize("make", [Nested])
def test_paths_may_return_other_strides_in_sizes_that_vary(make: type[nn.Module]) -> None:
    module = make()
    found = captured(module, "x:1=1..64", x=torch.randn(2, 5, 4))
    assert found.branches
    for length in LENGTHS:
        for sign in (-1, 1):
            check(found, module, x=sign * torch.rand(2, length, 4))


class Dtypes(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x.amax(-1)
        if x.sum() > 0:
            y = x.argmax(-1)
        return y + 1


def test_paths_of_two_dtypes_are_refused_by_name() -> None:
    with pytest.raises(CaptureError, match=r"y is torch\.int64 on one path and torch\.float32"):
        captured(Dtypes(), "x:1=1..64", x=torch.randn(2, 5, 4))


class Last(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Any:
        found, last = self.layer(x)
        return found, last[0] if isinstance(last, tuple) else last


@pytest.mark.slow
def test_recurrent_layers_stay_whole_over_any_number_of_steps() -> None:
    module = Last(nn.LSTM(4, 6, 2, batch_first=True, bidirectional=True)).eval()
    found = captured(module, "x:1=1..64", x=torch.randn(2, 5, 4))
    calls = [str(node.target) for node in all_nodes(found.program)]
    assert calls.count("aten.lstm.input") == 1
    assert not found.other_sizes
    assert not found.unlike_eager
    for length in (1, 2, 64):
        check(found, module, x=torch.randn(3, length, 4))


@pytest.mark.slow
def test_a_recurrent_engine_of_any_length_is_one_node(tmp_path: Path) -> None:
    layer = nn.RNN(4, 6, nonlinearity="relu", bidirectional=True, batch_first=True)
    module, example = Last(layer).eval(), {"x": torch.randn(2, 5, 4)}
    options = ModelOptions(dynamic=("x:1=1..16",))
    done = export(ExportRequest(module, tmp_path / "bundle", example=example, options=options))
    assert done.report.verdict.outcome == "verified"
    assert done.ops["RNN"] == 1
    assert not {"Loop", "Scan", "If"} & {*done.ops}


class Called(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


LENGTHS_OF: dict[str, Callable[[Tensor], Tensor]] = {
    "max_pool1d": lambda x: functional.max_pool1d(x.transpose(1, 2), 2, padding=1),
    "ceiling": lambda x: x[:, : math.ceil(x.shape[1] / 4)] + 1,
    "head times weights": lambda x: x[:, :8] @ torch.ones(4, 3),
}


@pytest.mark.parametrize("name", LENGTHS_OF)
def test_lengths_that_follow_from_others(name: str) -> None:
    module = Called(LENGTHS_OF[name])
    found = captured(module, "x:1=1..64", x=torch.randn(2, 5, 4))
    for length in LENGTHS:
        check(found, module, x=torch.randn(2, length, 4))
