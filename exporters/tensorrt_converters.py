"""What torch_tensorrt is to make of our ops: converters that it is given when the route runs.

TensorRT 10.15 and 11.0 have no layer that normalises by root mean squares: INormalizationLayer
takes the mean off (its documentation in the Python API reference).  So a norm is written as a
chain in fp32, which keeps it one thing until then.

A scale is a constant of no dimension or of one, in the dtype of what it scales
(https://docs.nvidia.com/deeplearning/tensorrt/operators/docs/Quantize.html, Dequantize.html).  One
that this dtype does not hold exactly stays fp32: then what it scales is fp32 as well, with a cast.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from enginecast.errors import LoweringError
from enginecast.exporters.tensorrt_program import ONNX_ROUTE, scale_axis
from enginecast.passes.purity import aten, own

Converter = Callable[[Any, Any, Sequence[Any], Mapping[str, Any], str], Any]
"""What torch_tensorrt calls: context, op, arguments, keywords, name; it returns an ITensor.

Arguments are ITensors, or torch's tensors where they are constants.
"""

_DTYPES = {torch.float32: "FLOAT", torch.float16: "HALF", torch.bfloat16: "BF16"}


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
    for op, converter in _Layers(trt, constant).converters.items():
        conversion.dynamo_tensorrt_converter(op, supports_dynamic_shapes=True)(converter)


class _Layers:
    """Writes each op as layers of a network."""

    def __init__(self, trt: Any, constant: Callable[..., Any]) -> None:
        self._trt = trt
        self._constant = constant
        self.converters: Mapping[Any, Converter] = {
            own.quantize.default: self._quantize,
            own.dequantize.default: self._dequantize,
            own.quantized_linear.default: self._quantized_linear,
            own.whole_rms_norm.default: self._rms_norm,
            aten.gather.default: self._gather,
        }

    def _quantize(
        self, ctx: Any, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], name: str
    ) -> Any:
        x, scale, _ = args
        trt = self._trt
        dtype = next(one for one in _DTYPES if x.dtype == self._dtype(one))
        held = _held(scale, dtype)
        if held.dtype != dtype:
            x = _output(ctx.net.add_cast(x, trt.DataType.FLOAT), f"{name}_wide")
        number = self._constant(ctx, held.reshape(()), f"{name}_scale")
        return _output(ctx.net.add_quantize(x, number, trt.DataType.FP8), name)

    def _dequantize(
        self, ctx: Any, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], name: str
    ) -> Any:
        values, scale, dtype = args
        return self._dequantized(ctx, values, scale, dtype, name)

    def _quantized_linear(
        self, ctx: Any, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], name: str
    ) -> Any:
        """A product of dequantised values, which TensorRT computes in fp8 where it can."""
        x, x_scale, weight, weight_scale, bias, dtype = args
        rank = len(x.shape)
        if rank < 2:
            raise LoweringError(
                f"{name}: expected a matrix or a batch of them, got {rank} dimensions",
                hint=ONNX_ROUTE,
            )
        # The dims that it is broadcast along are the constant's own: nothing stands between what
        # dequantises and the product.
        wide = weight.reshape(*[1] * (rank - 2), *weight.shape)
        product = ctx.net.add_matrix_multiply(
            self._dequantized(ctx, x, x_scale, dtype, f"{name}_x"),
            self._trt.MatrixOperation.NONE,
            self._dequantized(ctx, wide, weight_scale, dtype, f"{name}_weight"),
            self._trt.MatrixOperation.TRANSPOSE,
        )
        found = _output(product, name)
        if bias is None:
            return found
        row = bias.to(dtype).reshape(*[1] * (rank - 1), -1)
        added = self._constant(ctx, row, f"{name}_bias")
        return self._elementwise(ctx, found, added, "SUM", f"{name}_sum")

    def _dequantized(
        self, ctx: Any, values: Any, scale: Tensor, dtype: torch.dtype, name: str
    ) -> Any:
        axis = scale_axis(scale.shape, tuple(values.shape))
        if axis is None:
            raise LoweringError(f"{name}: expected scales of one dimension, got {[*scale.shape]}")
        held = _held(scale, dtype)
        number = self._constant(ctx, held.reshape(() if axis < 0 else (-1,)), f"{name}_scale")
        if isinstance(values, Tensor):
            values = self._constant(ctx, values, f"{name}_values")
        layer = ctx.net.add_dequantize(values, number, self._dtype(held.dtype))
        found = _output(layer, f"{name}_dequantized")
        if axis >= 0:
            layer.axis = axis
        if held.dtype == dtype:
            return found
        return _output(ctx.net.add_cast(found, self._dtype(dtype)), f"{name}_narrow")

    def _rms_norm(
        self, ctx: Any, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], name: str
    ) -> Any:
        x, dims, weight, epsilon = args
        trt, net, rank = self._trt, ctx.net, len(x.shape)
        is_wide = x.dtype == trt.DataType.FLOAT
        wide = x if is_wide else _output(net.add_cast(x, trt.DataType.FLOAT), f"{name}_wide")
        squares = self._elementwise(ctx, wide, wide, "PROD", f"{name}_squares")
        axes = sum(1 << axis for axis in range(rank - dims, rank))
        mean = net.add_reduce(squares, trt.ReduceOperation.AVG, axes, True)
        least = self._constant(ctx, torch.full([1] * rank, epsilon), f"{name}_epsilon")
        total = self._elementwise(ctx, _output(mean, f"{name}_mean"), least, "SUM", f"{name}_sum")
        root = _output(net.add_unary(total, trt.UnaryOperation.SQRT), f"{name}_root")
        found = self._elementwise(ctx, wide, root, "DIV", name)
        if weight is not None:
            row = weight.float().reshape(*[1] * (rank - dims), *weight.shape)
            factor = self._constant(ctx, row, f"{name}_weight")
            found = self._elementwise(ctx, found, factor, "PROD", f"{name}_scaled")
        return found if is_wide else _output(net.add_cast(found, x.dtype), f"{name}_narrow")

    def _gather(
        self, ctx: Any, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], name: str
    ) -> Any:
        """Of aten: torch_tensorrt's own declines shapes that vary, and BERT looks types up so."""
        values, dim, indices = args[:3]
        data, read = (
            self._constant(ctx, one, f"{name}_{role}") if isinstance(one, Tensor) else one
            for one, role in ((values, "data"), (indices, "indices"))
        )
        layer = ctx.net.add_gather_v2(data, read, self._trt.GatherMode.ELEMENT)
        found = _output(layer, name)
        layer.axis = dim % len(data.shape)
        return found

    def _elementwise(self, ctx: Any, left: Any, right: Any, operation: str, name: str) -> Any:
        kind = getattr(self._trt.ElementWiseOperation, operation)
        return _output(ctx.net.add_elementwise(left, right, kind), name)

    def _dtype(self, dtype: torch.dtype) -> Any:
        return getattr(self._trt.DataType, _DTYPES[dtype])


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
