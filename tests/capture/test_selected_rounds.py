"""Loops over the places of a mask, as mixtures of experts have."""

import pytest
import torch
from torch import Tensor, nn

from enginecast.capture.control_flow.operators import dispatch
from enginecast.capture.inputs.examples import example_sizes, sample
from enginecast.capture.inputs.specs import from_example
from enginecast.capture.sources.factory import FactorySource
from enginecast.capture.tracing.captured import capture

EXPERTS = 4


class Experts(nn.Module):
    """Goes through the experts that were hit; each adds to the rows that were routed to it."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(6, EXPERTS)
        self.weight = nn.Parameter(torch.randn(EXPERTS - 1, 6, 6))

    def forward(self, x: Tensor) -> Tensor:
        total = torch.zeros_like(x)
        scores, chosen = self.router(x).softmax(-1).topk(2, -1)
        mask = nn.functional.one_hot(chosen, EXPERTS).permute(2, 1, 0)
        for hit in mask.sum(dim=(-1, -2)).gt(0).nonzero(as_tuple=False):
            expert = int(hit.item())
            place, row = torch.where(mask[expert])
            if row.numel() == 0:
                continue
            if expert >= EXPERTS - 1:
                found = x[row]
            else:
                found = nn.functional.linear(x[row], self.weight[expert]).relu()
            total.index_add_(0, row, found * scores[row, place, None])
        return total


@pytest.mark.parametrize(("kind", "few"), [(Experts, 16)], ids=["places"])
@pytest.mark.slow
def test_a_loop_over_hit_experts_is_a_branch_for_each(
    kind: type[Experts], few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "FEW_PLACES", few)
    torch.manual_seed(0)
    module = kind().eval()
    example = {"x": torch.randn(5, 6)}
    specs = from_example(example, None)
    source = FactorySource("experts", module, example)
    inputs = sample(specs, example_sizes(specs), 0)
    found = capture(source, specs, inputs, fallback="rewrite")
    assert found.rungs[-1].name == "rewrite"
    program = found.program.module()
    for rows in (2, 3, 9):
        x = torch.randn(rows, 6)
        with torch.no_grad():
            torch.testing.assert_close(program(x=x)["output_0"], module(x))
