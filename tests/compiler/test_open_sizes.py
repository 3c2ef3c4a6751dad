"""Sizes that torch.export does not vouch for by itself: parts, and sizes that do not fit."""

from collections.abc import Callable

import pytest
import sympy  # type: ignore[import-untyped] # it has no stubs
import torch
from torch import Tensor, nn
from torch.utils._sympy.functions import OpaqueUnaryFn_sqrt, ToFloat, TruncToInt

from enginecast.capture.inputs.examples import example_sizes, sample
from enginecast.capture.outputs.flatten import ALL
from enginecast.capture.sources.open_source import open_source
from enginecast.capture.tracing.captured import Captured, capture
from enginecast.capture.tracing.sizes.shapes import printed
from enginecast.compiler.prepare.open_model import input_specs
from enginecast.compiler.ranges.sizes import judge_sizes
from enginecast.errors import CaptureError
from enginecast.runtime.size_checks import holds

pytestmark = pytest.mark.all_sizes


class Called(nn.Module):
    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def captured(module: nn.Module, *dynamic: str, **example: Tensor) -> Captured:
    source = open_source(module, example=example)
    specs = input_specs(source, None, dynamic).specs
    return capture(source, specs, sample(specs, example_sizes(specs), 0), fallback="rewrite")


PARTS: dict[str, Callable[[Tensor], Tensor]] = {
    "head": lambda x: x[:10] * 2,
    "third": lambda x: x[::3] + 1,
    "unfold": lambda x: x.unfold(0, 2, 2).sum(-1),
}


@pytest.mark.parametrize("name", PARTS)
def test_parts_of_an_asked_range(name: str) -> None:
    x = torch.arange(80.0).reshape(20, 4)
    found = captured(Called(PARTS[name]), "x:0=2..64", x=x)
    program = found.program.module(check_guards=False)
    for size in (2, 3, 9, 10, 11, 64):
        inputs = torch.randn(size, 4)
        [result] = program(x=inputs).values()
        assert torch.equal(result, PARTS[name](inputs)), size
    assert not found.unlike_eager
    assert not found.other_sizes


"""Functions that torch makes of other operators on real tensors than in a trace."""


def test_conditions_with_floats_are_read_without_torch() -> None:
    """As of the sizes that images are resized to: torch prints `torch.sym_float(n)`."""
    size = sympy.Symbol("n", integer=True, positive=True)
    for value in (ToFloat(size), OpaqueUnaryFn_sqrt(size)):
        condition = printed(TruncToInt(value * 0.7) < 5)
        assert holds(condition, {"n": 7})
        assert not holds(condition, {"n": 64})


def test_a_path_of_size_one_is_not_lost() -> None:
    module = Called(lambda x: x * 2 if x.shape[0] // 2 == 1 else x * 3)
    with pytest.raises(Exception, match="does not take all sizes"):
        captured(module, "x:0=2..64", x=torch.randn(20, 4))


class Printed(nn.Module):
    """A test of values, for which it is rewritten, and one that a trace answers for any size."""

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            x = x * 3
        return x * 2 if str(x.shape[0]) == "37" else x


def test_code_that_is_rewritten_is_tried_in_other_sizes() -> None:
    x = torch.randn(20, 4)
    settled = settled_of(Printed(), x)
    assert settled.inputs[0].dims[0].maximum == 36
    assert "batch takes 1..36" in settled.notes[-1]
    assert not settled.other_sizes
    with pytest.raises(CaptureError, match="with batch = 37 the model's code does something else"):
        settled_of(Printed(), x, "x:0=1..64")


def settled_of(module: nn.Module, x: Tensor, *dynamic: str) -> Captured:
    return judge_sizes(open_source(module, example={"x": x}), captured(module, *dynamic, x=x), ALL)
