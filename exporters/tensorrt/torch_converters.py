"""Converters of our ops for torch_tensorrt, registered when that route runs.

TensorRT 10.15 and 11.0 have no layer that normalizes by root mean squares: INormalizationLayer
takes the mean off (its documentation in the Python API reference).  So a norm is written as a
chain in fp32, which keeps it one thing until then.

A scale is a constant of no dimension or of one, in the dtype of what it scales
(https://docs.nvidia.com/deeplearning/tensorrt/operators/docs/Quantize.html, Dequantize.html).  One
that this dtype does not hold exactly stays fp32: then what it scales is fp32 as well, with a cast.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from enginecast.errors import LoweringError
from enginecast.ops.rules import Rules
from enginecast.passes.ir.effects import aten, own

ONNX_ROUTE = "Use --target-option route=onnx."
_DTYPES = {torch.float32: "FLOAT", torch.float16: "HALF", torch.bfloat16: "BF16"}


@dataclass(frozen=True)
class Layers:
    """The network that is being written."""

    trt: Any
    """The module tensorrt."""
    ctx: Any
    """torch_tensorrt's, of one conversion."""
    make_constant: Callable[..., Any]

    @property
    def network(self) -> Any:
        """An INetworkDefinition."""
        return self.ctx.net

    def constant(self, value: Tensor, name: str) -> Any:
        """A tensor as an ITensor."""
        return self.make_constant(self.ctx, value, name)

    def elementwise(self, left: Any, right: Any, operation: str, name: str) -> Any:
        """A sum, product or quotient: "SUM", "PROD" or "DIV"."""
        kind = getattr(self.trt.ElementWiseOperation, operation)
        return _output(self.network.add_elementwise(left, right, kind), name)

    def cast(self, x: Any, dtype: torch.dtype, name: str) -> Any:
        """A value in another dtype."""
        return _output(self.network.add_cast(x, self.dtype(dtype)), name)

    def dtype(self, dtype: torch.dtype) -> Any:
        """What TensorRT calls it."""
        return getattr(self.trt.DataType, _DTYPES[dtype])


Converter = Callable[..., Any]
"""Takes the network, a name and the op's arguments, and returns an ITensor.

Arguments are ITensors, or torch's tensors where they are constants.
"""
CONVERTERS: Rules[Converter] = Rules()
"""Op -> its layers."""
CONVERTERS.refuse(
    *(own.attention.default, own.skip_rms_norm.default),
    reason="it is taken apart before, for torch_tensorrt to convert",
)
CONVERTERS.refuse(
    *(own.dynamic_scale.default, own.blockwise_linear.default, own.quantize_blocks.default),
    own.power_of_two.default,
    reason="TensorRT wants scales that are constants, of one dimension at most",
)
CONVERTERS.refuse(
    *(own.quantize_affine.default, own.dequantize_affine.default),
    *(own.quantized_conv.default, own.quantized_add.default),
    reason="TensorRT has no unsigned integers",
)
CONVERTERS.refuse(own.quantized_lstm.default, reason="it rounds by what it reads")
CONVERTERS.refuse(own.quantized_gru.default, reason="it rounds by what it reads")


def register_converters(trt: Any, conversion: Any, constant: Callable[..., Any]) -> None:
    """Give torch_tensorrt the converters of our ops, unless it got them before.

    One of aten comes after those that it has itself, which decline some shapes.

    Args:
        trt: the module tensorrt.
        conversion: torch_tensorrt.dynamo.conversion.
        constant: its `converter_utils.get_trt_tensor`, which keeps a value alive until the engine
            is built, and by its name for a refit.
    """
    if own.quantize.default in conversion.DYNAMO_CONVERTERS:
        return
    register = conversion.dynamo_tensorrt_converter
    for op, converter in CONVERTERS.items():
        register(op, supports_dynamic_shapes=True)(_called(converter, trt, constant))


def _called(converter: Converter, trt: Any, constant: Callable[..., Any]) -> Callable[..., Any]:
    """A converter as torch_tensorrt calls it."""

    def convert(ctx: Any, op: Any, args: Sequence[Any], kwargs: Any, name: str) -> Any:
        return converter(Layers(trt, ctx, constant), name, *args)

    return convert


@CONVERTERS.rule(own.quantize.default)
def _quantize(layers: Layers, name: str, x: Any, scale: Tensor, _: torch.dtype) -> Any:
    dtype = next(one for one in _DTYPES if x.dtype == layers.dtype(one))
    held = _held(scale, dtype)
    if held.dtype != dtype:
        x = layers.cast(x, torch.float32, f"{name}_wide")
    number = layers.constant(held.reshape(()), f"{name}_scale")
    return _output(layers.network.add_quantize(x, number, layers.trt.DataType.FP8), name)


@CONVERTERS.rule(own.dequantize.default)
def _dequantize(layers: Layers, name: str, values: Any, scale: Tensor, dtype: torch.dtype) -> Any:
    axis = scale_axis(scale.shape, tuple(values.shape))
    if axis is None:
        raise LoweringError(f"{name}: expected scales of one dimension, got {[*scale.shape]}")
    held = _held(scale, dtype)
    number = layers.constant(held.reshape(() if axis < 0 else (-1,)), f"{name}_scale")
    if isinstance(values, Tensor):
        values = layers.constant(values, f"{name}_values")
    layer = layers.network.add_dequantize(values, number, layers.dtype(held.dtype))
    found = _output(layer, f"{name}_dequantized")
    if axis >= 0:
        layer.axis = axis
    return found if held.dtype == dtype else layers.cast(found, dtype, f"{name}_narrow")


@CONVERTERS.rule(own.quantized_linear.default)
def _quantized_linear(
    layers: Layers,
    name: str,
    x: Any,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Any:
    """A product of dequantized values, which TensorRT computes in fp8 where it can."""
    rank = len(x.shape)
    if rank < 2:
        raise LoweringError(
            f"{name}: expected a matrix or a batch of them, got {rank} dimensions", hint=ONNX_ROUTE
        )
    # The dims that it is broadcast along are the constant's own: nothing stands between what
    # dequantizes and the product.
    wide = weight.reshape(*[1] * (rank - 2), *weight.shape)
    product = layers.network.add_matrix_multiply(
        _dequantize(layers, f"{name}_x", x, x_scale, dtype),
        layers.trt.MatrixOperation.NONE,
        _dequantize(layers, f"{name}_weight", wide, weight_scale, dtype),
        layers.trt.MatrixOperation.TRANSPOSE,
    )
    found = _output(product, name)
    if bias is None:
        return found
    row = bias.to(dtype).reshape(*[1] * (rank - 1), -1)
    return layers.elementwise(found, layers.constant(row, f"{name}_bias"), "SUM", f"{name}_sum")


@CONVERTERS.rule(own.whole_rms_norm.default)
def _rms_norm(
    layers: Layers, name: str, x: Any, dims: int, weight: Tensor | None, epsilon: float
) -> Any:
    trt, rank = layers.trt, len(x.shape)
    is_wide = x.dtype == trt.DataType.FLOAT
    wide = x if is_wide else layers.cast(x, torch.float32, f"{name}_wide")
    squares = layers.elementwise(wide, wide, "PROD", f"{name}_squares")
    axes = sum(1 << axis for axis in range(rank - dims, rank))
    average = layers.network.add_reduce(squares, trt.ReduceOperation.AVG, axes, True)
    mean = _output(average, f"{name}_mean")
    least = layers.constant(torch.full([1] * rank, epsilon), f"{name}_epsilon")
    total = layers.elementwise(mean, least, "SUM", f"{name}_sum")
    root = _output(layers.network.add_unary(total, trt.UnaryOperation.SQRT), f"{name}_root")
    found = layers.elementwise(wide, root, "DIV", name)
    if weight is not None:
        row = weight.float().reshape(*[1] * (rank - dims), *weight.shape)
        factor = layers.constant(row, f"{name}_weight")
        found = layers.elementwise(found, factor, "PROD", f"{name}_scaled")
    return found if is_wide else _output(layers.network.add_cast(found, x.dtype), f"{name}_narrow")


@CONVERTERS.rule(aten.gather.default)
def _gather(layers: Layers, name: str, values: Any, dim: int, indices: Any, *_: Any) -> Any:
    """torch_tensorrt's own declines shapes that vary, and BERT looks types up so."""
    data, read = (
        layers.constant(one, f"{name}_{role}") if isinstance(one, Tensor) else one
        for one, role in ((values, "data"), (indices, "indices"))
    )
    layer = layers.network.add_gather_v2(data, read, layers.trt.GatherMode.ELEMENT)
    found = _output(layer, name)
    layer.axis = dim % len(data.shape)
    return found


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


def _held(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The scale in a dtype, or in fp32 where that rounds it."""
    wide = scale.float()
    narrow = wide.to(dtype)
    return narrow if torch.equal(narrow.float(), wide) else wide


def _output(layer: Any, name: str) -> Any:
    """What a layer gives, the layer named.

    Raises:
        LoweringError: TensorRT made no layer.
    """
    if layer is None:
        raise LoweringError(f"TensorRT makes no layer for {name}", hint=ONNX_ROUTE)
    layer.name = name
    return layer.get_output(0)
