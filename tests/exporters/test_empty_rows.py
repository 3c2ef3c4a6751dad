"""Ops on rows that values choose, of which there may be none: ONNX Runtime's kernels and rewrites
do otherwise there, or end the process.
"""

from collections.abc import Callable
from pathlib import Path

import onnx
import onnxruntime
import pytest
import torch
from lowering import lower, run
from programs import captured, count, rewritten
from torch import Tensor, nn
from torch.nn import functional as F

from enginecast.exporters.onnx.lower import GRAPH_FILE, lowering

OPS: dict[str, Callable[[Tensor], Tensor]] = {
    "place of the largest": lambda rows: rows.argmax(-1),
    "place of the least": lambda rows: rows.argmin(-1, keepdim=True),
    "place of the largest integer": lambda rows: rows.long().argmax(-1),
    "one of eight": lambda rows: F.one_hot(rows.argmax(-1), 8),
    "largest": lambda rows: rows.max(-1)[0],
    "median": lambda rows: rows.median(-1)[0],
    "repeated columns": lambda rows: rows.repeat_interleave(2, -1),
    "repeated rows": lambda rows: rows.repeat_interleave(2, 0),
    "groups": lambda rows: F.group_norm(rows, 2),
    "groups of pixels": lambda rows: F.group_norm(rows.view(-1, 2, 2, 2), 2),
}


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


def test_no_rows(tmp_path: Path) -> None:
    net = Chosen(*OPS.values())
    lower(captured(net, drawn()), tmp_path, [f"out_{name}" for name in OPS])
    for x in (NONE, SOME, drawn()):
        for name, found, wanted in zip(OPS, run(tmp_path, x), net(x), strict=True):
            assert found.shape == wanted.shape, name
            torch.testing.assert_close(found, wanted)


def heads(rows: Tensor) -> Tensor:
    split: Tensor = rows.unflatten(-1, (2, 4))
    return split.transpose(0, 1)


def test_products_of_heads_keep_their_transposes(tmp_path: Path) -> None:
    """ONNX Runtime's FusedMatMul divides by the number of rows that it transposes."""
    net = Chosen(lambda rows: ((q := heads(rows)) @ q.mT).softmax(-1) @ q)
    lower(captured(net, drawn()), tmp_path)
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    onnxruntime.InferenceSession(tmp_path / GRAPH_FILE, options, ["CPUExecutionProvider"])
    left = onnx.load(tmp_path / "optimized.onnx", load_external_data=False).graph.node
    moved = [a for node in left for a in node.attribute if a.name.startswith("transBatch") and a.i]
    assert not moved  # else the process ends below
    for x in (NONE, SOME, drawn()):
        torch.testing.assert_close(run(tmp_path, x)[0], net(x)[0])


@pytest.mark.parametrize("has_bias", [False, True])
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


def test_attention_among_rows_of_inputs_stays_one_op() -> None:
    class Attends(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            q: Tensor = x.unflatten(-1, (2, 4))
            q = q.transpose(1, 2)
            bias = -torch.arange(x.shape[1]).float().expand(1, 1, x.shape[1], -1)
            return (q @ q.transpose(-1, -2) * 0.5 + bias).softmax(-1) @ q

    sizes = {0: torch.export.Dim("batch", max=64), 1: torch.export.Dim("length", max=64)}
    program = torch.export.export(Attends(), (torch.randn(2, 5, 8),), dynamic_shapes=(sizes,))
    ready, _ = rewritten(program, f"canonicalize,fuse-attention,{lowering('onnxruntime-cpu')}")
    assert count(ready, "enginecast.attention.default") == 1
