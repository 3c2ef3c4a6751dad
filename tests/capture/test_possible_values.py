"""Tests of a mask that come out the same for all masks of zeros and ones."""

import torch
from torch import Tensor, nn

from enginecast.capture.inputs.examples import example_sizes, sample
from enginecast.capture.inputs.specs import from_example
from enginecast.capture.sources.factory import FactorySource
from enginecast.capture.tracing.captured import Captured, capture


class Windows(nn.Module):
    """Attends to tokens that are marked by a two, of which a mask of zeros and ones has none."""

    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        mask = nn.functional.pad(attention_mask, (0, 3), value=0)
        expanded = mask[:, None, :].to(x.dtype)
        inverted = 1.0 - expanded
        hidden = inverted.masked_fill(inverted.bool(), torch.finfo(x.dtype).min) * inverted
        everywhere = torch.ones((), dtype=torch.bool) & (expanded == 1)
        hidden = torch.where(everywhere, torch.zeros(()), hidden)
        hidden[expanded == 2] = torch.finfo(x.dtype).max
        is_global = (hidden[:, 0, :] > 0).flatten().any().item()
        if is_global:
            x = x * 2
            x = x[: int(attention_mask.sum())]
        return x + (hidden < 0).sum()


class Sums(Windows):
    """Its test is one of inputs."""

    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        is_padded = (attention_mask < 1).any().item()
        return super().forward(x, attention_mask) * (2 if is_padded else 3)


def captured(module: nn.Module, fallback: str = "rewrite") -> Captured:
    example = {"x": torch.randn(3, 5), "attention_mask": torch.ones(3, 5, dtype=torch.int64)}
    specs = from_example(example, None)
    source = FactorySource("windows", module.eval(), example)
    inputs = sample(specs, example_sizes(specs), 0)
    return capture(source, specs, inputs, fallback=fallback)  # type: ignore[arg-type]


def test_a_test_that_no_mask_passes_is_answered() -> None:
    found = captured(Windows(), "none")
    assert found.rungs[-1].name == "bake"
    x, mask = torch.randn(4, 5), torch.tensor([[1, 1, 0, 0, 1]] * 4)
    wanted = Windows()(x, mask)
    assert found.program.module()(x=x, attention_mask=mask)["output_0"].equal(wanted)


def test_a_test_that_some_masks_pass_is_not() -> None:
    found = captured(Sums())
    assert found.rungs[-1].name == "rewrite"
    program = found.program.module()
    for mask in (torch.ones(4, 5, dtype=torch.int64), torch.tensor([[1, 1, 0, 0, 1]] * 4)):
        x = torch.randn(4, 5)
        assert program(x=x, attention_mask=mask)["output_0"].equal(Sums()(x, mask))
