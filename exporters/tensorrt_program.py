"""Bring a program into the form that torch_tensorrt converts as a whole.

torch_tensorrt takes `aten.rms_norm` apart, and what torch makes of it on a GPU into products in the
dtype of its input (dynamo/lowering/passes/replace_fused_rms_norm.py), where the square of 256 is
infinite in fp16; and it computes what reads constants alone beforehand.  So norms get a name that
it does not know, for a converter of ours, and what reads a quantised weight is tagged (see
`enginecast.quantized_ops`).

    %n = aten.rms_norm(%x, [d], %w, 1e-6)          %n = enginecast.whole_rms_norm(%x, 1, %w, 1e-6)
    %q = aten.embedding(%w8, %ids)                 %w = enginecast.dequantize(%w8, %s, f16)
    %t = aten.embedding(%s, %ids)                  %r = aten.embedding(%w, %ids)
    %r = enginecast.dequantize(%q, %t, f16)
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx import Node
from torch.nn import functional

from enginecast.errors import LoweringError
from enginecast.exporters.assertions import drop_assertions
from enginecast.exporters.flat_calls import flatten_calls
from enginecast.exporters.hoist_weights import hoist_weights
from enginecast.exporters.inductor_ops import plain_ops
from enginecast.exporters.onnx import input_names, refuse_state
from enginecast.exporters.rules import apply_rules
from enginecast.exporters.weights_file import check_dtypes
from enginecast.passes.graph_edit import (
    arguments,
    aten,
    dtype_of,
    erase_dead,
    insert,
    shape_of,
    structural_copy,
    tracked_outputs,
    weight_specs,
)
from enginecast.passes.lift_weights import lift_weights
from enginecast.passes.match import is_call
from enginecast.passes.purity import own
from enginecast.passes.source import call_place
from enginecast.passes.structure import all_nodes

FP8 = torch.float8_e4m3fn
"""The one that TensorRT calls FP8."""
QUANTISED = (own.quantize.default, own.dequantize.default, own.quantized_linear.default)
"""What converters of ours know."""
ONNX_ROUTE = "Use --trt-route onnx."

_NO_FORM = (own.dynamic_scale.default, own.blockwise_linear.default, own.quantize_blocks.default)


@torch.library.custom_op("enginecast::whole_rms_norm", mutates_args=())
def whole_rms_norm(x: Tensor, dims: int, weight: Tensor | None, epsilon: float) -> Tensor:
    """`aten.rms_norm` over the last dims: computed in fp32, the product with the weight included.

    Args:
        x: any float dtype.
        dims: how many of the last dims are normalised.
        weight: of the shape of those dims, any float dtype.
        epsilon: added to the mean of squares.

    Returns:
        Shape and dtype of x.
    """
    scale = None if weight is None else weight.float()
    found = functional.rms_norm(x.float(), list(x.shape[x.dim() - dims :]), scale, epsilon)
    return found.to(x.dtype).contiguous()


@whole_rms_norm.register_fake
def _whole_rms_norm_fake(x: Tensor, dims: int, weight: Tensor | None, epsilon: float) -> Tensor:
    return x.new_empty(x.shape)


@dataclass(frozen=True)
class Prepared:
    """A program that torch_tensorrt can take, and what was left out of it."""

    program: ExportedProgram
    notes: tuple[str, ...]


def prepare_program(program: ExportedProgram) -> Prepared:
    """A copy without our fused ops, called with tensors in order, its weights computed.

    Args:
        program: after the passes; left as it is.

    Raises:
        LoweringError: forward keeps state, a weight is complex, values are quantised in a way that
            TensorRT has no form for, or one value is several outputs.
    """
    program = structural_copy(program)
    refuse_state(program)
    _refuse_equal_outputs(program)
    notes = drop_assertions(program)
    plain_ops(program)
    apply_rules(program, {aten.rms_norm.default: _whole_norm})
    lift_weights(program)
    weights = hoist_weights(program)
    check_dtypes(weights)
    for weight in weights:
        program._state_dict[weight.placeholder] = nn.Parameter(weight.compute(), False)
    _whole_tables(program)
    constants = frozenset(weight_specs(program))
    for node in all_nodes(program):
        _check_quantised(node, constants)
    flatten_calls(program, input_names(program))
    return Prepared(program, notes)


def _whole_norm(program: ExportedProgram, node: Node) -> None:
    x, size, weight, epsilon = (*arguments(node), None, None)[:4]
    if epsilon is None:
        epsilon = torch.finfo(torch.float32).eps  # what aten takes, and it computes in fp32
    with program.graph.inserting_before(node):
        args = (x, len(size), weight, epsilon)
        whole = insert(program.graph, own.whole_rms_norm.default, args, like=node)
    node.replace_all_uses_with(whole)
    program.graph.erase_node(node)


def _whole_tables(program: ExportedProgram) -> None:
    """Look up dequantised rows instead of dequantising the rows that were looked up.

    Scales have to be constants, and there is no lookup of fp8 values.
    """
    with tracked_outputs(program):
        for node in program.graph.find_nodes(op="call_function", target=own.dequantize.default):
            rows, scales, dtype = arguments(node)
            tables = [n for n in (rows, scales) if is_call(n, aten.embedding.default)]
            if len(tables) != 2 or rows.args[1:] != scales.args[1:]:
                continue
            with program.graph.inserting_before(node):
                args = (rows.args[0], scales.args[0], dtype)
                table = insert(program.graph, node.target, args, like=node)
                found = insert(
                    program.graph, aten.embedding.default, (table, *rows.args[1:]), like=node
                )
            node.replace_all_uses_with(found)
            program.graph.erase_node(node)
    erase_dead(program.graph)


def _refuse_equal_outputs(program: ExportedProgram) -> None:
    """torch_tensorrt marks a tensor as an output once, and counts on."""
    names = program.graph_signature.user_outputs
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise LoweringError(
            f"the value '{twice}' is {names.count(twice)} outputs, and torch_tensorrt gives it as"
            " one",
            hint=ONNX_ROUTE,
        )


def _check_quantised(node: Node, constants: frozenset[str]) -> None:
    """Raise unless TensorRT has layers for what the node computes."""
    if node.target in _NO_FORM:
        raise _no_form(node, "scales that are computed while it runs, or scales of blocks")
    if node.target not in QUANTISED:
        return
    values = {own.quantize.default: (node,), own.dequantize.default: (node.args[0],)}
    for value in values.get(node.target, (node.args[0], node.args[2])):
        if dtype_of(value) != FP8:
            raise _no_form(node, str(dtype_of(value)).removeprefix("torch."), expected="fp8 e4m3fn")
    for scale, scaled in _scales(node):
        if getattr(scale, "name", None) not in constants:
            raise _no_form(node, "a scale that is no constant")
        if scale_axis(shape_of(scale), shape_of(scaled)) is None:
            raise _no_form(node, f"scales of shape {[*shape_of(scale)]}", expected="one dimension")
    if node.target is own.quantize.default and scale_axis(shape_of(arguments(node)[1]), ()) != -1:
        raise _no_form(node, "a scale for each row of activations", expected="one for all")


def _scales(node: Node) -> list[tuple[Any, Any]]:
    """Each scale and what it scales."""
    if node.target is own.quantized_linear.default:
        x, x_scale, weight, weight_scale, *_ = node.args
        return [(x_scale, x), (weight_scale, weight)]
    return [(node.args[1], node.args[0])]


def scale_axis(scale: Any, scaled: Any) -> int | None:
    """The dimension that a scale has a number for each index of; -1: one number for all; None: of
    several, or broadcast beyond it.
    """
    wide = [dim - len(scale) for dim, size in enumerate(scale) if size != 1]
    if not wide:
        return -1
    axis = wide[0] + len(scaled)
    if len(wide) > 1 or axis < 0 or scaled[axis] != scale[wide[0]]:
        return None
    return axis


def _no_form(node: Node, got: str, *, expected: str = "scales that are constants") -> LoweringError:
    return LoweringError(
        f"TensorRT has no layer for {call_place(node)}: expected {expected}, got {got}",
        hint="Export with --precision fp8 for TensorRT, or quantise for another target.",
    )
