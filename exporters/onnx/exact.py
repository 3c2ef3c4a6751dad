"""Translations of ops whose plain form in ONNX is another computation: powers of integers in fp32,
a pool without its divisor, sums that are rounded at each step.
"""

import math
from collections.abc import Sequence
from typing import Any

import onnx_ir as ir
from onnxscript import opset23 as op
from onnxscript.function_libs.torch_lib.ops import core
from onnxscript.function_libs.torch_lib.ops import nn as torch_nn

from enginecast.exporters.onnx.ordered import INT64, ints
from enginecast.exporters.onnx.stable import (
    DOUBLE,
    FLOAT,
    HALVES,
    REALS,
    STABLE,
    cast,
    in_fp32,
    like,
    value,
)
from enginecast.exporters.onnx.translations import scalar
from enginecast.passes.ir.effects import aten

_BITS = 63
"""Of an exponent that varies."""

_MOVES = frozenset({"Expand", "Identity", "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze"})
"""What changes no value."""


@STABLE.rule(aten.pow.Tensor_Scalar)
def _pow_of_number(x: Any, exponent: Any) -> Any:
    if x.dtype in REALS or isinstance(exponent, float):
        x = x if x.dtype in REALS else cast(x, FLOAT)
        return op.Pow(x, like(x, exponent))
    base = cast(x, INT64)
    result = None
    while exponent:
        if exponent & 1:
            result = base if result is None else op.Mul(result, base)
        exponent >>= 1
        base = op.Mul(base, base) if exponent else base
    if result is None:
        result = op.Expand(op.Constant(value_int=1), op.Shape(x))
    return result if x.dtype == ir.DataType.BOOL else op.CastLike(result, x)


@STABLE.rule(aten.pow.Scalar)
def _pow_of_scalar(base: Any, exponent: Any) -> Any:
    if isinstance(base, float) and exponent.dtype not in REALS:
        exponent = cast(exponent, FLOAT)
    return _pow(like(exponent, base), exponent, exponent.dtype)


@STABLE.rule(aten.pow.Tensor_Tensor)
def _pow_of_tensor(x: Any, exponent: Any) -> Any:
    dtype = exponent.dtype if exponent.dtype in REALS and x.dtype not in REALS else x.dtype
    return _pow(cast(x, dtype), cast(exponent, dtype), dtype)


def _pow(x: Any, exponent: Any, dtype: ir.DataType) -> Any:
    """By squares, for integers; 1, -1 or 0 for a negative exponent."""
    if dtype in REALS:
        return op.Pow(x, exponent)
    base, left = op.Cast(x, to=int(INT64)), op.Cast(exponent, to=int(INT64))
    zero, one, two = (op.Constant(value_int=number) for number in range(3))
    is_odd = op.Equal(op.Mod(left, two), one)
    unit = op.Equal(op.Abs(base), one)
    inverse = op.Where(unit, op.Where(is_odd, base, one), zero)
    is_negative = op.Less(left, zero)
    result: Any = one
    power = base
    for bit in range(_BITS):
        if bit:
            left, power = op.Div(left, two), op.Mul(power, power)
            is_odd = op.Equal(op.Mod(left, two), one)
        result = op.Mul(result, op.Where(is_odd, power, one))
    return op.Cast(op.Where(is_negative, inverse, result), to=int(dtype))


_COMPLEX = (ir.DataType.COMPLEX64, ir.DataType.COMPLEX128)


@STABLE.rule(aten.scalar_tensor.default)
def _scalar_tensor(number: Any, dtype: int = -1, *_: Any, **__: Any) -> Any:
    """torchlib rounds a number to fp32 first, and so a number beside fp64 values loses digits."""
    wanted = FLOAT if dtype == -1 else ir.DataType(dtype)
    is_real = isinstance(number, int | float)
    if is_real and wanted not in _COMPLEX:
        return _constant(number, wanted)
    is_pair = wanted in _COMPLEX and not is_real
    return (core.aten_scalar_tensor_complex if is_pair else core.aten_scalar_tensor)(number, dtype)


@STABLE.rule(aten.full.default)
def _full(size: Any, number: Any, dtype: int = -1, *_: Any, **__: Any) -> Any:
    if dtype != int(DOUBLE) or not isinstance(number, int | float):
        return core.aten_full(size, number, dtype)
    return op.Expand(_constant(number, DOUBLE), op.Cast(size, to=int(INT64)))


@STABLE.rule(aten.full_like.default)
def _full_like(x: Any, number: Any, dtype: int = -1, *_: Any, **__: Any) -> Any:
    wanted = x.dtype if dtype == -1 else ir.DataType(dtype)
    if wanted != DOUBLE or not isinstance(number, int | float):
        return core.aten_full_like(x, number, dtype)
    return op.Expand(_constant(number, DOUBLE), op.Shape(x))


@STABLE.rule(aten.masked_fill.Scalar)
def _masked_fill(x: Any, mask: Any, number: Any) -> Any:
    if x.dtype != DOUBLE or not isinstance(number, int | float):
        return core.aten_masked_fill(x, mask, number)
    return op.Where(mask, _constant(number, DOUBLE), x)


def _constant(number: float, dtype: ir.DataType) -> Any:
    """A number in a dtype, a whole one without a detour by floats."""
    if dtype in REALS:
        return scalar(float(number), dtype)
    return op.Cast(op.Constant(value_int=int(number)), to=int(dtype))


@STABLE.rule(aten.sum.dim_IntList)
def _sum_along(x: Any, dim: Any = None, keepdim: bool = False, *, dtype: int | None = None) -> Any:
    """ONNX Runtime (1.31) adds integers in fp64, so a sum of products, as of a hash, loses digits.

    The low and the high 32 bits are added apart, and so the sum wraps around, as torch's does.
    """
    if x.dtype != INT64 or not x.shape or dtype not in (None, -1, int(INT64)) or not _is_product(x):
        return core.aten_sum_dim_IntList(x, dim, keepdim, -1 if dtype is None else dtype)
    axes = [] if dim is None else [ints(*([dim] if isinstance(dim, int) else dim))]
    unit = op.Constant(value_int=1 << 32)
    low = op.Mod(x, unit)
    high = op.Div(op.Sub(x, low), unit)
    totals = (op.ReduceSum(part, *axes, keepdims=int(keepdim)) for part in (high, low))
    return op.Add(op.Mul(next(totals), unit), next(totals))


@STABLE.rule(aten.cumsum.default)
def _cumsum(x: Any, dim: int, *, dtype: int | None = None) -> Any:
    """ONNX Runtime rounds each partial sum; torch keeps those of fp32 in fp64 and of 16 bits in
    fp32.
    """
    wide = DOUBLE if x.dtype == FLOAT else FLOAT if x.dtype in HALVES else None
    if wide is None or dtype not in (None, -1, int(x.dtype)) or not x.shape:
        return core.aten_cumsum(x, dim, -1 if dtype is None else dtype)
    total = op.CumSum(cast(x, wide), op.Constant(value_int=dim))
    return op.Cast(total, to=int(x.dtype))


def _is_product(x: Any) -> bool:
    """Whether a value is a product, if moved: other integers are far from 2**53."""
    node = x.producer()
    while node is not None and node.op_type in _MOVES:
        node = node.inputs[0].producer()
    return node is not None and node.op_type == "Mul"


@STABLE.rule(
    *(aten.bitwise_left_shift.Tensor, aten.bitwise_left_shift.Tensor_Scalar),
    *(aten.__lshift__.Tensor, aten.__lshift__.Scalar),
)
def _left_shift(x: Any, by: Any) -> Any:
    """Nothing is left of a shift by all bits, or by less than none, whose bits ONNX leaves open."""
    return _shift(core.aten_bitwise_left_shift, x, by, "LEFT")


@STABLE.rule(
    *(aten.bitwise_right_shift.Tensor, aten.bitwise_right_shift.Tensor_Scalar),
    *(aten.__rshift__.Tensor, aten.__rshift__.Scalar),
)
def _right_shift(x: Any, by: Any) -> Any:
    """A shift by all bits, or by less than none, leaves the sign alone."""
    return _shift(core.aten_bitwise_right_shift, x, by, "RIGHT")


def _shift(shift: Any, x: Any, by: Any, direction: str) -> Any:
    bits = x.dtype.bitwidth
    by = value(by, x)
    is_unsigned = x.dtype == ir.DataType.UINT8
    most = bits - 1 if direction == "RIGHT" and not is_unsigned else bits
    is_within = op.Less(by, like(x, most))
    if not is_unsigned:
        is_within = op.And(is_within, op.GreaterOrEqual(by, like(x, 0)))
    if direction == "RIGHT" and not is_unsigned:
        within = op.Where(is_within, by, like(x, most))
        within.dtype = x.dtype
        return shift(x, within)
    within = op.Where(is_within, by, like(x, 0))
    within.dtype = x.dtype
    found = op.BitShift(x, within, direction=direction) if is_unsigned else shift(x, within)
    return op.Where(is_within, found, like(x, 0))


@STABLE.rule(aten.addmm.default)
def _addmm(c: Any, a: Any, b: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    """Gemm has no kernel for integers."""
    if c.dtype in REALS:
        return op.Gemm(a, b, c, alpha=float(alpha), beta=float(beta))
    product, bias = op.MatMul(a, b), c
    product = product if alpha == 1 else op.Mul(product, value(alpha, c))
    return op.Add(product, bias if beta == 1 else op.Mul(bias, value(beta, c)))


_ERFC = (
    *(-1.26551223, 1.00002368, 0.37409196, 0.09678418, -0.18628806),
    *(0.27886807, -1.13520398, 1.48851587, -0.82215223, 0.17087277),
)
"""Coefficients of the fit below, constant first."""


@STABLE.rule(aten.erfc.default, aten.special_erfc.default)
def _erfc(x: Any) -> Any:
    """1 - erf(x) has no digits left beyond 4: a Chebyshev fit, right to 1.2e-7 everywhere (Press et
    al., Numerical Recipes, 2nd edition, 6.2), in fp64.
    """
    wide, fit = _fitted(x)
    found = op.Mul(fit, op.Exp(op.Neg(op.Mul(wide, wide))))
    turned = op.Sub(scalar(2.0, DOUBLE), found)
    return _of_sign(x, wide, found, turned)


@STABLE.rule(aten.special_erfcx.default)
def _erfcx(x: Any) -> Any:
    """erfc(x) exp(x x), without the factors that leave the range."""
    wide, fit = _fitted(x)
    turned = op.Sub(op.Mul(scalar(2.0, DOUBLE), op.Exp(op.Mul(wide, wide))), fit)
    return _of_sign(x, wide, fit, turned)


def _fitted(x: Any) -> tuple[Any, Any]:
    """A value in fp64, and erfcx of its size."""
    wide = cast(x, DOUBLE)
    one = scalar(1.0, DOUBLE)
    t = op.Div(one, op.Add(one, op.Mul(op.Abs(wide), scalar(0.5, DOUBLE))))
    fit: Any = scalar(_ERFC[-1], DOUBLE)
    for coefficient in reversed(_ERFC[:-1]):
        fit = op.Add(op.Mul(fit, t), scalar(coefficient, DOUBLE))
    return wide, op.Mul(t, op.Exp(fit))


def _of_sign(x: Any, wide: Any, positive: Any, negative: Any) -> Any:
    found = op.Where(op.Less(wide, scalar(0.0, DOUBLE)), negative, positive)
    return op.Cast(found, to=int(x.dtype if x.dtype in REALS else FLOAT))


@STABLE.rule(aten.logdet.default)
@in_fp32
def _logdet(x: Any) -> Any:
    """With what is largest in each row divided out: the determinant would leave the range."""
    largest = op.ReduceMax(op.Abs(x), ints(-1), keepdims=1)
    is_plain = op.Or(op.Equal(largest, like(x, 0.0)), op.IsInf(largest))
    by = op.Where(is_plain, like(x, 1.0), largest)
    rest = op.Log(op.Det(op.Div(x, by)))
    return op.Add(rest, op.ReduceSum(op.Log(by), ints(-2, -1), keepdims=0))


@STABLE.rule(aten.hardtanh.default)
def _hardtanh(x: Any, low: float = -1.0, high: float = 1.0) -> Any:
    """The bounds of integers are cut to integers."""
    number = float if x.dtype in REALS else int
    return op.Clip(x, like(x, number(low)), like(x, number(high)))


@STABLE.rule(aten.rrelu_with_noise_functional.default)
def _rrelu(
    x: Any, noise: Any, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False
) -> tuple[Any, Any]:
    """The slope is the mean one where nothing is drawn."""
    if training:
        raise ValueError("it draws random numbers while it trains")
    return op.LeakyRelu(x, alpha=(lower + upper) / 2), noise


@STABLE.rule(aten.ceil.default)
def _ceil(x: Any) -> Any:
    return op.Ceil(x) if x.dtype in REALS else op.Identity(x)


@STABLE.rule(aten.floor.default)
def _floor(x: Any) -> Any:
    return op.Floor(x) if x.dtype in REALS else op.Identity(x)


@STABLE.rule(aten.round.default)
def _round(x: Any) -> Any:
    return op.Round(x) if x.dtype in REALS else op.Identity(x)


@STABLE.rule(aten.trunc.default)
def _trunc(x: Any) -> Any:
    if x.dtype not in REALS:
        return op.Identity(x)
    return op.Mul(op.Sign(x), op.Floor(op.Abs(x)))


@STABLE.rule(aten.isnan.default)
def _isnan(x: Any) -> Any:
    return op.IsNaN(x) if x.dtype in REALS else op.Not(op.Equal(x, x))


@STABLE.rule(aten.isfinite.default)
def _isfinite(x: Any) -> Any:
    if x.dtype not in REALS:
        return op.Equal(x, x)
    return op.Not(op.Or(op.IsInf(cast(x, FLOAT) if x.dtype in HALVES else x), op.IsNaN(x)))


@STABLE.rule(aten.conv3d.default)
def _conv3d(
    x: Any,
    weight: Any,
    bias: Any = None,
    stride: Sequence[int] = (1, 1, 1),
    padding: Sequence[int] = (0, 0, 0),
    dilation: Sequence[int] = (1, 1, 1),
    groups: int = 1,
) -> Any:
    """torchlib's gives a convolution without bias one of two dims, and one without a batch none."""
    if x.shape is not None and len(x.shape) == 4:
        found: Any = _conv3d(
            op.Unsqueeze(x, ints(0)), weight, bias, stride, padding, dilation, groups
        )
        return op.Squeeze(found, ints(0))
    strides, pads, dilations = ([*each] * (3 // len(each)) for each in (stride, padding, dilation))
    return op.Conv(
        *((x, weight) if bias is None else (x, weight, bias)),
        strides=strides,
        pads=[*pads, *pads],
        dilations=dilations,
        group=groups,
    )


@STABLE.rule(aten.avg_pool2d.default)
def _avg_pool2d(
    x: Any,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0, 0),
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Any:
    return _avg_pool(
        torch_nn.aten_avg_pool2d,
        x,
        kernel_size,
        stride,
        padding,
        ceil_mode,
        count_include_pad,
        divisor_override,
    )


@STABLE.rule(aten.avg_pool3d.default)
def _avg_pool3d(
    x: Any,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0, 0, 0),
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Any:
    return _avg_pool(
        torch_nn.aten_avg_pool3d,
        x,
        kernel_size,
        stride,
        padding,
        ceil_mode,
        count_include_pad,
        divisor_override,
    )


@STABLE.rule(aten.max_pool1d_with_indices.default)
def _max_pool1d(x: Any, *options: Any) -> tuple[Any, Any]:
    return _max_pool(torch_nn.aten_max_pool1d_with_indices, 1, x, *options)


@STABLE.rule(aten.max_pool2d_with_indices.default)
def _max_pool2d(x: Any, *options: Any) -> tuple[Any, Any]:
    return _max_pool(torch_nn.aten_max_pool2d_with_indices, 2, x, *options)


@STABLE.rule(aten.max_pool3d_with_indices.default)
def _max_pool3d(x: Any, *options: Any) -> tuple[Any, Any]:
    return _max_pool(torch_nn.aten_max_pool3d_with_indices, 3, x, *options)


def _max_pool(pool: Any, rank: int, x: Any, *options: Any) -> tuple[Any, Any]:
    """A window with NaN gives NaN, and the place of the last one, which is the largest such place.

    ONNX Runtime (1.31) passes some of them by.
    """
    found, places = pool(x, *options)
    if x.dtype not in REALS:
        return found, places
    sizes = op.Shape(x, start=-rank)
    zero, one = op.Constant(value_int=0), op.Constant(value_int=1)
    every = op.Reshape(op.Range(zero, op.ReduceProd(sizes, keepdims=0), one), sizes)
    numbers = op.Cast(every, to=int(DOUBLE))
    holes = op.Where(op.IsNaN(x), numbers, scalar(-1.0, DOUBLE))
    holes.dtype, holes.shape = DOUBLE, x.shape
    last, _ = pool(holes, *options)
    is_hole = op.GreaterOrEqual(last, scalar(0.0, DOUBLE))
    largest = op.Where(is_hole, like(x, math.nan), found)
    return largest, op.Where(is_hole, op.Cast(last, to=int(INT64)), places)


def _avg_pool(
    pool: Any,
    x: Any,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    ceil_mode: bool,
    count_include_pad: bool,
    divisor: int | None,
) -> Any:
    if divisor is None:
        return pool(x, kernel_size, stride, padding, ceil_mode, count_include_pad)
    if ceil_mode:
        raise ValueError("ONNX divides windows that reach beyond the input by their own size")
    found = pool(x, kernel_size, stride, padding, False, True)
    return op.Mul(found, like(x, math.prod(kernel_size) / divisor))


@STABLE.rule(aten._cdist_forward.default)
def _cdist(x: Any, y: Any, p: float, compute_mode: int | None = None) -> Any:
    """Distances of all rows to all rows, from their differences."""
    return _norm_of(op.Abs(op.Sub(op.Unsqueeze(x, ints(-2)), op.Unsqueeze(y, ints(-3)))), x, p)


@STABLE.rule(aten._pdist_forward.default)
def _pdist(x: Any, p: float = 2.0) -> Any:
    """Distances of each row to all that come later."""
    count = op.Shape(x, start=0, end=1)
    every = op.Expand(op.Constant(value_int=1), op.Concat(count, count, axis=0))
    pairs = op.NonZero(op.Trilu(every, op.Constant(value_int=1), upper=1))
    rows = [op.Gather(x, op.Gather(pairs, op.Constant(value_int=at), axis=0)) for at in (0, 1)]
    return _norm_of(op.Abs(op.Sub(*rows)), x, p)


def _norm_of(apart: Any, x: Any, p: float) -> Any:
    """The norms of absolute values along the last dimension, in the dtype of `x`."""
    last = ints(-1)
    if p == 0:
        differs = op.Not(op.Equal(apart, like(x, 0.0)))
        return op.ReduceSum(op.CastLike(differs, x), last, keepdims=0)
    if p == 1:
        return op.ReduceSum(apart, last, keepdims=0)
    if p == math.inf:
        return op.ReduceMax(apart, last, keepdims=0)
    if p == 2:
        return op.Sqrt(op.ReduceSum(op.Mul(apart, apart), last, keepdims=0))
    total = op.ReduceSum(op.Pow(apart, like(x, p)), last, keepdims=0)
    return op.Pow(total, like(x, 1 / p))
