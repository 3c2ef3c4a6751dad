"""Operators of `aten` that make tensors, and that compute element by element."""

import math
from typing import Any

import onnx_ir as ir
import torch
from onnxscript import opset23 as op
from onnxscript.function_libs.torch_lib.ops import core as torch_core
from torch import Tensor
from torch.fx import Node

from enginecast.exporters.onnx.ops.registry import form, refuse, rewrite, torch_form
from enginecast.exporters.onnx.ops.values import (
    BOOL,
    DOUBLE,
    FLOAT,
    HALVES,
    INT32,
    INT64,
    REALS,
    cast,
    compared,
    in_fp32,
    like,
    pair,
    scalar,
    value,
)
from enginecast.passes.ir.base import ProgramView
from enginecast.passes.ir.edit import arguments, dtype_of, first_input, insert
from enginecast.passes.ir.effects import aten

# Tensors of numbers

_COMPLEX = (ir.DataType.COMPLEX64, ir.DataType.COMPLEX128)


@form(aten.scalar_tensor.default)
def _scalar_tensor(number: Any, dtype: int = -1, *_: Any, **__: Any) -> Any:
    """torchlib rounds a number to fp32 first, and so a number beside fp64 values loses digits."""
    wanted = FLOAT if dtype == -1 else ir.DataType(dtype)
    is_real = isinstance(number, int | float)
    if is_real and wanted not in _COMPLEX:
        return _constant(number, wanted)
    is_pair = wanted in _COMPLEX and not is_real
    return (torch_core.aten_scalar_tensor_complex if is_pair else torch_core.aten_scalar_tensor)(
        number, dtype
    )


@form(aten.full.default)
def _full(size: Any, number: Any, dtype: int = -1, *_: Any, **__: Any) -> Any:
    if dtype != int(DOUBLE) or not isinstance(number, int | float):
        return torch_core.aten_full(size, number, dtype)
    return op.Expand(_constant(number, DOUBLE), op.Cast(size, to=int(INT64)))


@form(aten.full_like.default)
def _full_like(x: Any, number: Any, dtype: int = -1, *_: Any, **__: Any) -> Any:
    wanted = x.dtype if dtype == -1 else ir.DataType(dtype)
    if wanted != DOUBLE or not isinstance(number, int | float):
        return torch_core.aten_full_like(x, number, dtype)
    return op.Expand(_constant(number, DOUBLE), op.Shape(x))


def _constant(number: float, dtype: ir.DataType) -> Any:
    """A number in a dtype, a whole one without a detour by floats."""
    if dtype in REALS:
        return scalar(float(number), dtype)
    return op.Cast(op.Constant(value_int=int(number)), to=int(dtype))


@form(aten.arange.start_step)
def _arange(start: Any, end: Any, step: Any = 1, dtype: int = -1, **_: Any) -> Any:
    """Counted in fp64, as torch does: in fp32, 7 / 0.7 is more than 10."""
    parts = start, end, step
    if all(_is_whole(part) for part in parts):
        first, last, by = (_number(part, INT64) for part in parts)
        numbers = op.Range(first, last, by)
        return numbers if dtype in (-1, INT64) else op.Cast(numbers, to=dtype)
    wanted = int(FLOAT) if dtype == -1 else dtype
    if any(isinstance(part, ir.Value) and part.dtype in REALS for part in parts):
        numbers = op.Range(*(_number(part, FLOAT) for part in parts))  # it was computed in fp32
        return op.Cast(numbers, to=wanted)
    first, last, by = (_number(part, DOUBLE) for part in parts)
    count = op.Cast(op.Ceil(op.Div(op.Sub(last, first), by)), to=int(INT64))
    zero, one = (op.Constant(value_int=number) for number in (0, 1))
    indices = op.Cast(op.Range(zero, count, one), to=int(DOUBLE))
    return op.Cast(op.Add(op.Mul(indices, by), first), to=wanted)


def _is_whole(part: Any) -> bool:
    if isinstance(part, ir.Value):
        return part.dtype not in REALS
    return isinstance(part, int)


def _number(part: Any, dtype: ir.DataType) -> Any:
    if isinstance(part, ir.Value):
        return op.Cast(part, to=int(dtype))
    if dtype == INT64:
        return op.Constant(value_int=part)
    return scalar(float(part), dtype)


# Powers and quotients

_BITS = 63
"""Of an exponent that varies."""


@form(aten.pow.Tensor_Scalar)
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
    return result if x.dtype == BOOL else op.CastLike(result, x)


@form(aten.pow.Scalar)
def _pow_of_scalar(base: Any, exponent: Any) -> Any:
    if isinstance(base, float) and exponent.dtype not in REALS:
        exponent = cast(exponent, FLOAT)
    return _pow(like(exponent, base), exponent, exponent.dtype)


@form(aten.pow.Tensor_Tensor)
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


def _remainder_of(x: Any, y: Any) -> Any:
    """`x % y` of floats: fmod, which is exact, moved to the sign of y."""
    rest, zero = op.Mod(x, y, fmod=1), like(x, 0.0)
    differs = op.Xor(op.Less(rest, zero), op.Less(y, zero))
    moves = op.And(op.Not(op.Equal(rest, zero)), differs)
    return op.Where(moves, op.Add(rest, y), rest)


def _floor_div_of(x: Any, y: Any) -> Any:
    """`x // y` of floats, as in Python: (x - x % y) / y, rounded to a whole number.

    It is one less than the quotient without the rest where their signs differ, so -1 // inf is -1.
    """
    rest, zero, one = op.Mod(x, y, fmod=1), like(x, 0.0), like(x, 1.0)
    differs = op.Xor(op.Less(rest, zero), op.Less(y, zero))
    moves = op.And(op.Not(op.Equal(rest, zero)), differs)
    quotient = op.Div(op.Sub(x, rest), y)
    whole = op.Where(moves, op.Sub(quotient, one), quotient)
    down = op.Floor(whole)
    near = op.Where(op.Greater(op.Sub(whole, down), like(x, 0.5)), op.Add(down, one), down)
    return op.Where(op.Equal(y, zero), op.Div(x, y), near)


@form(aten.remainder.Tensor, aten.remainder.Scalar)
@in_fp32
def _remainder(x: Any, y: Any) -> Any:
    x, y = pair(x, y)
    return _remainder_of(x, y) if x.dtype in REALS else op.Mod(x, y)


@form(aten.floor_divide.default, aten.floor_divide.Scalar)
@in_fp32
def _floor_divide(x: Any, y: Any) -> Any:
    x, y = pair(x, y)
    if x.dtype in REALS:
        return _floor_div_of(x, y)
    if x.dtype in (ir.DataType.INT8, ir.DataType.INT16):  # -128 less its remainder is not an int8
        wide: Any = _floor_divide(cast(x, INT32), cast(y, INT32))
        return cast(wide, x.dtype)
    return op.Div(op.Sub(x, op.Mod(x, y)), y)


@form(aten.div.Tensor_mode, aten.div.Scalar_mode)
@in_fp32
def _div(x: Any, y: Any, rounding_mode: str | None = None) -> Any:
    if rounding_mode == "floor":
        quotient: Any = _floor_divide(x, y)
        return quotient
    x, y = pair(x, y)
    if x.dtype in REALS:
        quotient = op.Div(x, y)
        if rounding_mode == "trunc":  # ONNX has no Trunc
            return op.Mul(op.Sign(quotient), op.Floor(op.Abs(quotient)))
        return quotient
    if rounding_mode == "trunc":
        return op.Div(x, y)
    return op.Div(op.Cast(x, to=int(FLOAT)), op.Cast(y, to=int(FLOAT)))


def _is_low_by_number(node: Node) -> bool:
    """Whether a quotient that is cut to a whole number is that of 16 bits and a number, which torch
    does not round to 16 bits: 0.3 and 0.30005 give another whole number.
    """
    low = dtype_of(node) in (torch.float16, torch.bfloat16)
    return low and isinstance(node.args[1], float)


@rewrite(aten.floor_divide.default, aten.div.Tensor_mode, when=_is_low_by_number)
def _quotient_in_fp32(program: ProgramView, node: Node) -> Node:
    graph, dtype = program.graph, dtype_of(node)
    wide = insert(graph, aten.to.dtype, (node.args[0], torch.float32), like=node)
    assert callable(node.target)
    found = insert(graph, node.target, (wide, *node.args[1:]), node.kwargs, like=node)
    return insert(graph, aten.to.dtype, (found, dtype), like=node)


refuse(*(aten.gcd.default, aten.lcm.default), reason="it has no divisors of integers")
refuse(
    *(aten.fmax.default, aten.fmin.default, aten.heaviside.default),
    reason="it has no such choice of numbers",
)

# Bits


@form(
    *(aten.bitwise_left_shift.Tensor, aten.bitwise_left_shift.Tensor_Scalar),
    *(aten.__lshift__.Tensor, aten.__lshift__.Scalar),
)
def _left_shift(x: Any, by: Any) -> Any:
    """Nothing is left of a shift by all bits, or by less than none, whose bits ONNX leaves open."""
    return _shift(torch_core.aten_bitwise_left_shift, x, by, "LEFT")


@form(
    *(aten.bitwise_right_shift.Tensor, aten.bitwise_right_shift.Tensor_Scalar),
    *(aten.__rshift__.Tensor, aten.__rshift__.Scalar),
)
def _right_shift(x: Any, by: Any) -> Any:
    """A shift by all bits, or by less than none, leaves the sign alone."""
    return _shift(torch_core.aten_bitwise_right_shift, x, by, "RIGHT")


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


# Rounding and kinds of numbers


def _of_reals(rounded: Any) -> Any:
    """Integers stay as they are: ONNX rounds floats alone."""

    def of_any(x: Any) -> Any:
        return rounded(x) if x.dtype in REALS else op.Identity(x)

    return of_any


form(aten.ceil.default)(_of_reals(op.Ceil))
form(aten.floor.default)(_of_reals(op.Floor))
form(aten.round.default)(_of_reals(op.Round))


@form(aten.trunc.default)
@_of_reals
def _trunc(x: Any) -> Any:
    """ONNX has no Trunc."""
    return op.Mul(op.Sign(x), op.Floor(op.Abs(x)))


@form(aten.round.decimals)
def _round_to(x: Any, *, decimals: int = 0) -> Any:
    """Multiplied before and divided after, or the other way round, as in torch's kernel."""
    if x.dtype not in REALS:
        return op.Identity(x)
    power = like(x, math.pow(10, abs(decimals)))
    if decimals < 0:
        return op.Mul(op.Round(op.Div(x, power)), power)
    return op.Div(op.Round(op.Mul(x, power)), power)


@form(aten.isnan.default)
def _isnan(x: Any) -> Any:
    return op.IsNaN(x) if x.dtype in REALS else op.Not(op.Equal(x, x))


@form(aten.isfinite.default)
def _isfinite(x: Any) -> Any:
    if x.dtype not in REALS:
        return op.Equal(x, x)
    return op.Not(op.Or(op.IsInf(cast(x, FLOAT) if x.dtype in HALVES else x), op.IsNaN(x)))


# Comparisons and choices


def _choose(x: Any, y: Any, *, largest: bool) -> Any:
    """The larger or the smaller of each pair; `x` knows its dtype, and so does the result.

    ONNX Runtime's (1.31, CPU) are wrong for some int64 (microsoft/onnxruntime#25280, #32475).
    """
    if x.dtype in REALS:
        found = (op.Max if largest else op.Min)(x, y)
    elif x.dtype == BOOL:
        found = (op.Or if largest else op.And)(x, y)
    else:
        wide = compared(x)
        other = cast(y, wide.dtype)
        takes = (op.Greater if largest else op.Less)(wide, other)
        found = op.CastLike(op.Where(takes, wide, other), x)
    found.dtype = x.dtype
    return found


@form(aten.maximum.default)
def _maximum(x: Any, y: Any) -> Any:
    return _choose(x, y, largest=True)


@form(aten.minimum.default)
def _minimum(x: Any, y: Any) -> Any:
    return _choose(x, y, largest=False)


@form(aten.clamp.default, aten.clamp.Tensor)
def _clamp(x: Any, min: Any = None, max: Any = None) -> Any:
    for bound in (min, max):
        if x.dtype not in REALS and _is_real(bound):
            x = cast(x, bound.dtype if isinstance(bound, ir.Value) else FLOAT)
    if x.dtype in REALS and not any(isinstance(bound, ir.Value) for bound in (min, max)):
        return op.Clip(x, *(None if bound is None else like(x, bound) for bound in (min, max)))
    if min is not None:
        x = _choose(x, value(min, x), largest=True)
    return x if max is None else _choose(x, value(max, x), largest=False)


def _is_real(bound: Any) -> bool:
    return isinstance(bound, float) or (isinstance(bound, ir.Value) and bound.dtype in REALS)


@form(aten.clamp_min.default, aten.clamp_min.Tensor)
def _clamp_min(x: Any, min: Any) -> Any:
    return _clamp(x, min)


@form(aten.clamp_max.default, aten.clamp_max.Tensor)
def _clamp_max(x: Any, max: Any) -> Any:
    return _clamp(x, None, max)


def _mixes_bounds(node: Node) -> bool:
    """Whether a clamp to floats has a whole number for a bound, or one of its bounds is a size."""
    dtype = dtype_of(node)
    if dtype is None or not dtype.is_floating_point:
        return False
    return any(map(_whole, node.args[1:3])) or _has_one_size(node)


def _has_one_size(node: Node) -> bool:
    bounds = [bound for bound in node.args[1:3] if bound is not None]
    return len(bounds) == 2 and sum(isinstance(bound, Node) for bound in bounds) == 1


def _whole(bound: object) -> bool:
    return isinstance(bound, int) and not isinstance(bound, bool)


@rewrite(aten.clamp.default, when=_mixes_bounds)
def _float_bounds(program: ProgramView, node: Node) -> None:
    """torch.onnx makes a tensor of one bound, and finds no clamp by a tensor and a number."""
    for index, bound in enumerate(arguments(node)[1:3], 1):
        if _whole(bound):
            node.update_arg(index, float(bound))
    if _has_one_size(node):  # the upper bound counts where it is below the lower one
        source, least, _ = arguments(node)
        above = insert(program.graph, aten.clamp.default, (source, least), like=node)
        node.update_arg(0, above)
        node.update_arg(1, None)


@form(aten.relu.default)
def _relu(x: Any) -> Any:
    return op.Relu(x) if x.dtype in REALS else _clamp(x, 0)


@form(aten.sign.default)
def _sign(x: Any) -> Any:
    """0 for NaN."""
    if x.dtype == BOOL:
        return op.Identity(x)
    wide, zero = compared(x), like(compared(x), 0)
    sides = [op.Cast(side(wide, zero), to=int(INT32)) for side in (op.Greater, op.Less)]
    return op.CastLike(op.Sub(*sides), x)


@form(aten.masked_fill.Scalar)
def _masked_fill(x: Any, mask: Any, number: Any) -> Any:
    if x.dtype != DOUBLE or not isinstance(number, int | float):
        return torch_core.aten_masked_fill(x, mask, number)
    return op.Where(mask, _constant(number, DOUBLE), x)


# Booleans, and numbers of several dtypes


def _is_of_bools(node: Node) -> bool:
    """Whether it gives booleans, for which ONNX Runtime (1.31) has no kernel of Where."""
    return dtype_of(node) == torch.bool


@torch_form(aten.where.self, when=_is_of_bools)
def _bools_where(condition: Tensor, x: Tensor, y: Tensor) -> Tensor:
    other = torch.logical_and(torch.logical_not(condition), y)
    return torch.logical_or(torch.logical_and(condition, x), other)


@torch_form(aten.masked_fill.Scalar, when=_is_of_bools)
def _bools_filled(x: Tensor, mask: Tensor, fill: Any) -> Tensor:
    if fill:
        return torch.logical_or(x, mask)
    return torch.logical_and(x, torch.logical_not(mask))


@torch_form(aten.add.Tensor, when=_is_of_bools)
def _bools_added(x: Tensor, y: Tensor, *, alpha: Any = 1) -> Tensor:
    """ONNX has no Add of booleans."""
    return torch.logical_or(x, y)


def _is_of_other_dtype(node: Node) -> bool:
    return dtype_of(first_input(node)) != dtype_of(node)


@rewrite(
    *(aten.rsub.Scalar, aten.softmax.int, aten.log_softmax.int),
    when=_is_of_other_dtype,
)
def _promoted(program: ProgramView, node: Node) -> None:
    """1.0 - mask of integers: torch.onnx looks for a subtraction of both dtypes and finds none.  It
    leaves the conversion of a softmax out.
    """
    args = (first_input(node), dtype_of(node))
    node.update_arg(0, insert(program.graph, aten.to.dtype, args, like=node))
