"""Recurrent layers and their cells.

torch's decomposition of a cell asks for the batch of the trace: cells are products and sums here.
"""

from collections.abc import Callable, Sequence
from typing import Any

from onnxscript import opset23 as op
from torch import Tensor
from torch.fx import Node

from enginecast.exporters.onnx.ops.nn import sigmoid
from enginecast.exporters.onnx.ops.registry import form, refuse, torch_form
from enginecast.exporters.onnx.ops.values import ints
from enginecast.passes.ir.edit import arguments, aten


@torch_form(aten.lstm_cell.default)
def _lstm_cell(
    x: Tensor, state: list[Tensor], w: Tensor, u: Tensor, b: Any = None, c: Any = None
) -> tuple[Tensor, Tensor]:
    enters, forgets, new, leaves = (_part(state[0], u, c) + _part(x, w, b)).chunk(4, -1)
    cell = sigmoid(forgets) * state[1] + sigmoid(enters) * new.tanh()
    return sigmoid(leaves) * cell.tanh(), cell


@torch_form(aten.gru_cell.default)
def _gru_cell(x: Tensor, hidden: Tensor, w: Tensor, u: Tensor, b: Any = None, c: Any = None) -> Any:
    given, kept = _part(x, w, b).chunk(3, -1), _part(hidden, u, c).chunk(3, -1)
    resets, updates = sigmoid(kept[0] + given[0]), sigmoid(kept[1] + given[1])
    new = (given[2] + kept[2] * resets).tanh()
    return (hidden - new) * updates + new


@torch_form(aten.rnn_tanh_cell.default)
def _tanh_cell(
    x: Tensor, hidden: Tensor, w: Tensor, u: Tensor, b: Any = None, c: Any = None
) -> Any:
    return (_part(hidden, u, c) + _part(x, w, b)).tanh()


@torch_form(aten.rnn_relu_cell.default)
def _relu_cell(
    x: Tensor, hidden: Tensor, w: Tensor, u: Tensor, b: Any = None, c: Any = None
) -> Any:
    return (_part(hidden, u, c) + _part(x, w, b)).relu()


def _part(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    product = x @ weight.t()
    return product if bias is None else product + bias


def _rnn(activation: str) -> Callable[..., tuple[Any, Any]]:
    """The translation of such layers, of which torch has none."""

    def translate(
        x: Any,
        start: Any,
        weights: Sequence[Any],
        has_biases: bool,
        layers: int,
        dropout: float,
        train: bool,
        both_ways: bool,
        batch_first: bool,
    ) -> tuple[Any, Any]:
        directions = 2 if both_ways else 1
        count = 4 if has_biases else 2
        rows = op.Transpose(x, perm=[1, 0, 2]) if batch_first else x
        axis = ints(0)
        ends = []
        for first in range(0, layers * directions, directions):
            places = [place * count for place in range(first, first + directions)]
            kinds = [[weights[place + kind] for place in places] for kind in range(count)]
            held = [op.Concat(*(op.Unsqueeze(w, axis) for w in kind), axis=0) for kind in kinds]
            bias = op.Concat(held[2], held[3], axis=1) if has_biases else None
            before = op.Slice(start, [first], [first + directions], axis)
            found, last = op.RNN(
                *(rows, held[0], held[1], bias, None, before),
                activations=[activation] * directions,
                direction="bidirectional" if both_ways else "forward",
                hidden_size=kinds[1][0].shape[-1],
            )
            by_row = op.Transpose(found, perm=[0, 2, 1, 3])  # from [S, directions, B, H]
            rows = op.Reshape(by_row, ints(0, 0, -1))
            ends.append(last)
        rows = op.Transpose(rows, perm=[1, 0, 2]) if batch_first else rows
        return rows, op.Concat(*ends, axis=0)

    return translate


def _projects(node: Node) -> bool:
    _, _, weights, has_biases, layers, _, _, both_ways, *_ = arguments(node)
    return bool(len(weights) > layers * (2 if both_ways else 1) * (4 if has_biases else 2))


refuse(aten.lstm.input, when=_projects, reason="ONNX's LSTM has no projection (proj_size)")
form(aten.rnn_tanh.input)(_rnn("Tanh"))
form(aten.rnn_relu.input)(_rnn("Relu"))
