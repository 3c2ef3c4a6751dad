"""Attention rows whose keys are all masked: the engine gives what eager gives there."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from lowering import lower, run
from programs import captured, count, rewritten
from torch import Tensor, nn
from torch.nn import functional

LOWEST = torch.finfo(torch.float32).min
FUSED = "unify-dtype{to=fp32},canonicalize,fuse-attention"


def causal(tokens: int, value: float) -> Tensor:
    return torch.full((tokens, tokens), value).triu(1)


BIASES: dict[str, Callable[[Tensor], Tensor]] = {
    "lowest": lambda keep: (1 - keep) * LOWEST,
    "infinite": lambda keep: torch.zeros_like(keep).masked_fill(keep == 0, -math.inf),
    "clamped-causal": lambda keep: ((1 - keep) * LOWEST + causal(keep.shape[-1], LOWEST)).clamp(
        min=LOWEST
    ),
    "bool": lambda keep: keep < 1,
}


class Masked(nn.Module):
    def __init__(self, kind: str, *, spelled_out: bool) -> None:
        super().__init__()
        self.kind, self.spelled_out = kind, spelled_out

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        bias = BIASES[self.kind](keep[:, None, None, :])
        if not self.spelled_out:
            return functional.scaled_dot_product_attention(x, x, x, attn_mask=bias)
        return ((x @ x.transpose(-1, -2)) * 0.5 + bias).softmax(-1) @ x


@pytest.mark.parametrize("kind", BIASES)
@pytest.mark.parametrize("spelled_out", [False, True], ids=["sdpa", "softmax"])
def test_rows_without_keys_are_those_of_eager(kind: str, spelled_out: bool, tmp_path: Path) -> None:
    module = Masked(kind, spelled_out=spelled_out)
    torch.manual_seed(0)
    x = torch.randn(3, 2, 4, 8)
    keep = torch.tensor([[0.0, 0, 0, 0], [0, 0, 1, 1], [1, 1, 0, 0]])
    fused, _ = rewritten(captured(module, x, keep), FUSED)
    assert count(fused, "enginecast.attention.default") == 1
    lower(fused, tmp_path)
    torch.testing.assert_close(run(tmp_path, x, keep)[0], module(x, keep), equal_nan=True)
