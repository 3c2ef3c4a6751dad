"""Ops on rows that values choose, of which there may be none: ONNX Runtime's kernels and rewrites
do otherwise there, or end the process.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from lowering import lower, run
from programs import captured, count, rewritten
from torch import Tensor, nn


class Chosen(nn.Module):
    def __init__(self, *ops: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.ops = ops

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        rows = x[x.sum(-1) > 3]
        return tuple(op(rows) for op in self.ops)


NONE = torch.zeros(3, 8)
SOME = torch.eye(8)[:3] * torch.tensor([[9.0], [1], [9]])


def drawn() -> Tensor:
    return torch.randn(3, 8, generator=torch.Generator().manual_seed(0)) + 2


def heads(rows: Tensor) -> Tensor:
    split: Tensor = rows.unflatten(-1, (2, 4))
    return split.transpose(0, 1)


@pytest.mark.parametrize("has_bias", [True])
def test_attention_among_no_rows(has_bias: bool, tmp_path: Path) -> None:
    """ONNX Runtime's Attention refuses them."""

    def attend(rows: Tensor) -> Tensor:
        q = heads(rows)[None]
        scores = q @ q.transpose(-1, -2) * 0.5
        if has_bias:
            places = torch.arange(rows.shape[0])
            scores = scores + (places[:, None] - places).abs().float()
        return scores.softmax(-1) @ q

    net = Chosen(attend)
    fused, _ = rewritten(captured(net, drawn()), "canonicalize,fuse-attention")
    assert count(fused, "enginecast.attention.default") == 1
    lower(fused, tmp_path)
    for x in (NONE, SOME, drawn()):
        torch.testing.assert_close(run(tmp_path, x)[0], net(x)[0])
