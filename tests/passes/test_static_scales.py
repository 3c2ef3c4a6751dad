"""Scales of activations that a backend holds in fp16."""

import pytest
import torch
from planned_programs import carried_out, plan_for
from programs import captured
from torch import nn

from enginecast.passes.ir.edit import weight_value
from enginecast.passes.ir.effects import own


@pytest.mark.parametrize("largest", [7.0, 1e-3, 0.0])
def test_they_are_exact_in_fp16_and_have_a_reciprocal_there(largest: float) -> None:
    torch.manual_seed(0)
    x = torch.full((2, 5, 32), largest)
    before = captured(nn.Linear(32, 48), x)
    plan = plan_for(before, "static")
    for options, dtype in (("", torch.float32), ("{scale_dtype=fp16}", torch.float16)):
        after, _ = carried_out(before, plan, x, options=options)
        (node,) = [n for n in after.graph.nodes if n.target is own.quantized_linear.default]
        scale = weight_value(after, node.args[1])
        assert scale.to(dtype).float() == scale >= largest / 448
        assert scale <= max(2.0**-14, largest / 448 * (1 + 2**-9))
        if dtype == torch.float16:
            assert (1 / scale.half()).isfinite()
