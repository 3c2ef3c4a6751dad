"""Loops with branches over which autograd is switched; tests of two values that are joined."""

import pytest
import torch
from torch import Tensor, nn

from enginecast.capture.inputs.examples import example_sizes, sample
from enginecast.capture.inputs.specs import from_example
from enginecast.capture.outputs.flatten import ALL
from enginecast.capture.sources.factory import FactorySource
from enginecast.capture.tracing.captured import capture


class Experts(nn.Module):
    """Goes through the experts that were hit; those beyond the first three give what they get."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.randn(3, 4, 4, generator=torch.Generator()))
        self.count = count

    @torch.no_grad()
    def chosen(self, x: Tensor) -> Tensor:
        return (x.abs().sum(-1) * 7).long() % self.count

    def forward(self, x: Tensor) -> Tensor:
        hits = nn.functional.one_hot(self.chosen(x), self.count).T
        result = torch.zeros_like(x)
        for row in hits.sum(-1).greater(0).nonzero():
            expert = int(row.item())
            [place] = torch.where(hits[expert])
            if place.numel() == 0:
                continue
            if expert >= 3 or self.weights is None:
                found = x[place]
            else:
                found = x[place] @ self.weights[expert]
            result.index_add_(0, place, found)
        return result


@pytest.mark.slow
def test_a_switch_of_autograd_leaves_nothing_in_a_program_with_branches() -> None:
    module = Experts(5).eval()
    example = {"x": torch.randn(6, 4)}
    specs = from_example(example)
    source = FactorySource("experts", module, example)
    inputs = sample(specs, example_sizes(specs), 0)
    program = capture(source, specs, inputs, ALL, "rewrite").program.module()
    for scale in (1.0, 0.1, 9.0):
        x = torch.randn(6, 4) * scale
        [given] = program(x=x).values()
        torch.testing.assert_close(given, module(x))
