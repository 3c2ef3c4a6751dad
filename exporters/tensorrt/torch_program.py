"""Keep from torch_tensorrt what it would not build, or would build wrongly."""

from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from enginecast.errors import LoweringError
from enginecast.passes.ir.blocks import all_nodes
from enginecast.passes.ir.edit import arguments, dtype_of, shape_of, weight_specs
from enginecast.passes.ir.effects import own
from enginecast.passes.ir.source import call_place

FP8 = torch.float8_e4m3fn
"""The one that TensorRT calls FP8."""
QUANTIZED = (own.quantize.default, own.dequantize.default, own.quantized_linear.default)
"""What converters of ours know."""
ONNX_ROUTE = "Use --trt-route onnx."

_NO_FORM = (own.dynamic_scale.default, own.blockwise_linear.default, own.quantize_blocks.default)


def check_program(program: ExportedProgram) -> None:
    """Look for what TensorRT has no layers for.

    Args:
        program: after the lowering passes.

    Raises:
        LoweringError: values are quantized in a way that TensorRT has no form for, or one value is
            several outputs.
    """
    names = program.graph_signature.user_outputs
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:  # torch_tensorrt marks a tensor as an output once, and counts on
        raise LoweringError(
            f"the value '{twice}' is {names.count(twice)} outputs, and torch_tensorrt gives it as"
            " one",
            hint=ONNX_ROUTE,
        )
    constants = frozenset(weight_specs(program))
    for node in all_nodes(program):
        _check_quantized(node, constants)


def _check_quantized(node: Node, constants: frozenset[str]) -> None:
    """Raise unless TensorRT has layers for what the node computes."""
    if node.target in _NO_FORM:
        raise _no_form(node, "scales that are computed while it runs, or scales of blocks")
    if node.target not in QUANTIZED:
        return
    if node.target is own.quantized_linear.default:
        x, x_scale, weight, weight_scale, *_ = arguments(node)
        values, scales = [x, weight], [(x_scale, x), (weight_scale, weight)]
    else:
        scaled, scale, *_ = arguments(node)
        values = [node if node.target is own.quantize.default else scaled]
        scales = [(scale, scaled)]
    for value in values:
        if dtype_of(value) != FP8:
            raise _no_form(node, str(dtype_of(value)).removeprefix("torch."), expected="fp8 e4m3fn")
    for scale, scaled in scales:
        if getattr(scale, "name", None) not in constants:
            raise _no_form(node, "a scale that is not a constant")
        if scale_axis(shape_of(scale), shape_of(scaled)) is None:
            raise _no_form(node, f"scales of shape {[*shape_of(scale)]}", expected="one dimension")
    if node.target is own.quantize.default and scale_axis(shape_of(arguments(node)[1]), ()) != -1:
        raise _no_form(node, "a scale for each row of activations", expected="one for all")


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
        hint="Export with --precision fp8 for TensorRT, or quantize for another target.",
    )
