"""The caller's own model after a trace: what it keeps outside of itself holds no fake tensor."""

import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from enginecast.capture.inputs.examples import example_sizes, sample
from enginecast.capture.python.preserve_caches import preserving_caches
from enginecast.capture.sources.open_source import open_source
from enginecast.capture.tracing.captured import capture
from enginecast.compiler.prepare.open_model import input_specs

TABLES: dict[int, Tensor] = {}


class OfClass(nn.Module):
    steps: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if OfClass.steps is None:
            OfClass.steps = torch.arange(8.0)
        return x * OfClass.steps


class Global(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - TABLES.setdefault(8, torch.arange(8.0))


class Cached(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + steps(8)


@functools.lru_cache
def steps(count: int) -> Tensor:
    return torch.arange(float(count))


def _unless_traced(function: Callable[[int], Tensor]) -> Callable[[int], Tensor]:
    remembering = functools.lru_cache(maxsize=4)(function)

    @functools.wraps(function)
    def either(count: int) -> Tensor:
        is_traced = torch.compiler.is_compiling()
        return function(count) if is_traced else remembering(count)

    return either


class OfFunction(nn.Module):
    """Remembered by what a decorator has around a function of a class, where nothing is traced: a
    walk on fake tensors is not a trace.
    """

    @staticmethod
    @_unless_traced
    def steps(count: int) -> Tensor:
        return torch.arange(float(count))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.steps(8)


@pytest.mark.parametrize("kind", [OfClass, Global, Cached])
def test_nothing_fake_is_left(kind: type[nn.Module]) -> None:
    x, module = torch.randn(3, 8), kind()
    source = open_source(module, example={"x": x})
    specs = input_specs(source, None, ()).specs
    found = capture(source, specs, sample(specs, example_sizes(specs), 0))
    result = module(x)
    assert type(result) is Tensor
    [traced] = found.program.module()(x=x).values()
    assert torch.equal(result, traced)


@pytest.mark.parametrize("kind", [Cached, OfFunction])
def test_nothing_fake_is_left_by_a_walk(kind: type[nn.Module]) -> None:
    steps.cache_clear()
    module = kind()
    with preserving_caches(module), FakeTensorMode():
        module(torch.ones(3, 8))
    assert type(module(torch.ones(3, 8))) is Tensor
