"""Models in fp32 that compute in 16 bits by themselves: their engines round where they do."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from enginecast.api import compile as export
from enginecast.compiler.steps import Steps
from enginecast.passes.unify_dtype import in_halves
from enginecast.runtime.load import load


class HalvesInside(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        first, second = (x.to(self.dtype) * 1.001).chunk(2, -1)
        return (first * second).float() + 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_an_engine_rounds_where_the_model_does(dtype: torch.dtype, tmp_path: Path) -> None:
    module, steps = HalvesInside(dtype), Steps()
    export(module, tmp_path / "bundle", example={"x": torch.randn(3, 8)}, steps=steps)
    assert any("computes in 16 bits itself" in line for line in steps.lines)
    x = torch.randn(40, 8, generator=torch.Generator().manual_seed(1))
    with load(tmp_path / "bundle") as engine:
        found = engine.run({"x": x.numpy()})
    assert np.array_equal(found["output_0"], module(x).numpy())


def test_a_model_that_is_in_16_bits_as_a_whole_does_not_count() -> None:
    module = nn.Sequential(nn.Linear(8, 8), nn.GELU()).half()
    program = torch.export.export(module, (torch.randn(3, 8).half(),))
    assert not in_halves(program)
    program = torch.export.export(HalvesInside(torch.float16), (torch.randn(3, 8),))
    assert len(in_halves(program)) == 3  # the cast and two products; a chunk rounds nothing
