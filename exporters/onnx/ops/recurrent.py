"""Recurrent layers and their cells.

torch's decomposition of a cell asks for the batch of the trace: cells are products and sums here.
"""

from collections.abc import Callable, Sequence
from typing import Any

import onnx_ir as ir
from onnxscript import opset23 as op
from onnxscript.function_libs.torch_lib.ops import core as torch_core
from torch import Tensor

from enginecast.exporters.onnx.ops.nn import sigmoid
from enginecast.exporters.onnx.ops.registry import ONNXRUNTIME, form, torch_form
from enginecast.exporters.onnx.ops.values import INT64, ints, scalar
from enginecast.library_names import private
from enginecast.passes.ir.effects import aten


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


@form(aten.lstm.input, readers=ONNXRUNTIME)
def _lstm(
    x: Any,
    start: Sequence[Any],
    weights: Sequence[Any],
    has_biases: bool,
    layers: int,
    dropout: float,
    train: bool,
    both_ways: bool,
    batch_first: bool,
) -> tuple[Any, Any, Any]:
    """torch's translation, but of a projection, which ONNX's LSTM has none of: a Scan for each
    direction of each layer.
    """
    directions = 2 if both_ways else 1
    count = 4 if has_biases else 2
    if len(weights) == layers * directions * count:
        rest = (has_biases, layers, dropout, train, both_ways, batch_first)
        plain: tuple[Any, Any, Any] = torch_core.aten_lstm(x, start, weights, *rest)
        return plain
    count += 1
    rows = op.Transpose(x, perm=[1, 0, 2]) if batch_first else x
    ends: list[tuple[Any, Any]] = []
    for _ in range(layers):
        outputs = []
        for backward in range(directions):
            place = len(ends)
            own_weights = weights[place * count : (place + 1) * count]
            first = [op.Gather(each, scalar(place, INT64)) for each in start]
            batch = start[0].shape[1]
            found, *last = _projected_direction(rows, first, own_weights, batch, bool(backward))
            outputs.append(found)
            ends.append((last[0], last[1]))
        rows = op.Concat(*outputs, axis=-1) if both_ways else outputs[0]
    axis = ints(0)
    state, cell = (
        op.Concat(*(op.Unsqueeze(each, axis) for each in some), axis=0)
        for some in zip(*ends, strict=True)
    )
    return op.Transpose(rows, perm=[1, 0, 2]) if batch_first else rows, state, cell


def _projected_direction(
    rows: Any, first: Sequence[Any], weights: Sequence[Any], batch: Any, backward: bool
) -> Sequence[Any]:
    """One direction of a layer, [S, B, P], and its last state [B, P] and cell [B, H].

    Args:
        first: state and cell before the first step.
        weights: of the input, of the state, perhaps biases of both, and the projection [P, H].
        batch: B.
    """
    call_op = private(f"{HOP}.call_op", "an LSTM")
    of_input, of_state, *biases, projection = weights
    given = op.MatMul(rows, op.Transpose(of_input, perm=[1, 0]))
    for bias in biases:
        given = op.Add(given, bias)
    turned = [op.Transpose(each, perm=[1, 0]) for each in (of_state, projection)]
    state, cell = first
    way = [1 if backward else 0]
    state, cell, found = call_op(
        *("Scan", state, cell, given),
        _num_outputs=3,
        body=_lstm_step(batch, projection, turned),
        num_scan_inputs=1,
        scan_input_directions=way,
        scan_output_directions=way,
    )
    return found, state, cell


def _lstm_step(batch: Any, projection: Any, kept: Sequence[Any]) -> ir.Graph:
    """The body of the Scan: from state, cell, and the products of one step of the input to the next
    state and cell, and the state once more.
    """
    shown_size, size = projection.shape
    shown_shape, shape = [batch, shown_size], [batch, size]
    body = Body("lstm", projection.dtype)
    add = body.add
    state, cell = body.value("state", shown_shape), body.value("cell", shape)
    given = body.value("given", [batch, 4 * size])
    gates = add("Add", given, add("MatMul", state, kept[0]))
    enters, forgets, new, leaves = add("Split", gates, count=4, axis=-1, num_outputs=4)
    entered = add("Mul", add("Sigmoid", enters), add("Tanh", new))
    following = add("Add", add("Mul", add("Sigmoid", forgets), cell), entered)
    shown = add("MatMul", add("Mul", add("Sigmoid", leaves), add("Tanh", following)), kept[1])
    outputs = [(shown, shown_shape), (following, shape), (add("Identity", shown), shown_shape)]
    return body.graph((state, cell, given), outputs)


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


form(aten.rnn_tanh.input)(_rnn("Tanh"))
form(aten.rnn_relu.input)(_rnn("Relu"))

HOP = "torch.onnx._internal.exporter._torchlib.ops.hop"


class Body:
    """The graph of a step, whose values are all of one dtype."""

    def __init__(self, name: str, dtype: ir.DataType) -> None:
        self._name = name
        self._type = ir.TensorType(dtype)
        self._nodes: list[ir.Node] = []

    def value(self, name: str, shape: Sequence[Any]) -> ir.Value:
        """An input."""
        return ir.Value(name=f"{self._name}_{name}", shape=ir.Shape(shape), type=self._type)

    def add(
        self, kind: str, *read: ir.Value | None, domain: str = "", count: int = 1, **more: Any
    ) -> Any:
        """The result of an op, or its `count` results."""
        attributes = ir.convenience.convert_attributes(more)
        node = ir.Node(domain, kind, read, attributes, num_outputs=count)
        for place, value in enumerate(node.outputs):
            value.name = f"{self._name}_{len(self._nodes)}_{place}"
            value.type = self._type
        self._nodes.append(node)
        return node.outputs[0] if count == 1 else node.outputs

    def graph(
        self, inputs: Sequence[ir.Value], outputs: Sequence[tuple[ir.Value, Sequence[Any]]]
    ) -> ir.Graph:
        """Of all ops, with outputs of these shapes."""
        for value, shape in outputs:
            value.shape = ir.Shape(shape)
        values = [value for value, _ in outputs]
        return ir.Graph(inputs, values, nodes=self._nodes, name=f"{self._name}_step")
