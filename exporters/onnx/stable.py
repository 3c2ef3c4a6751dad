"""Translations that keep the digits and the range which the plain ONNX form of an op loses.

torch.onnx says log1p(x) as Log(x + 1), which loses all digits of a small x; logsigmoid as
Log(Sigmoid(x)), which is -inf where torch gives x; x // y as Floor(x / y), which is off by one
where x / y rounds up to a whole number.  The formulas here are those of the C library and of
torch's own kernels; what computes in 16 bits computes them in fp32, as torch does.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import onnx_ir as ir
from onnxscript import opset23 as op

from enginecast.exporters.onnx.translations import scalar
from enginecast.ops.rules import Rules
from enginecast.passes.ir.effects import aten

STABLE: Rules[Callable[..., Any]] = Rules()
"""Op -> its translation, for every reader."""

FLOAT = ir.DataType.FLOAT
HALVES = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
NARROW = (ir.DataType.INT8, ir.DataType.INT16)
REALS = (FLOAT, ir.DataType.DOUBLE, *HALVES)


def in_fp32(formula: Callable[..., Any]) -> Callable[..., Any]:
    """Compute a formula of 16-bit values, which come first, in fp32."""

    @functools.wraps(formula)
    def widened(*values: Any, **options: Any) -> Any:
        dtype = values[0].dtype
        if dtype not in HALVES:
            return formula(*values, **options)
        wide = [cast(v, FLOAT) if isinstance(v, ir.Value) else v for v in values]
        return op.Cast(formula(*wide, **options), to=int(dtype))

    return widened


def cast(x: ir.Value, dtype: ir.DataType) -> Any:
    """A cast that knows its dtype and shape at once."""
    if x.dtype == dtype:
        return x
    found = op.Cast(x, to=int(dtype))
    found.dtype, found.shape = dtype, x.shape
    return found


def like(x: Any, value: float) -> Any:
    """A number in the dtype of `x`, which only inputs of the translated op know by now."""
    return op.CastLike(scalar(value), x) if x.dtype is None else scalar(value, x.dtype)


def value(x: Any, other: Any) -> Any:
    """A number or a tensor, as a tensor of the dtype of `other`."""
    if not isinstance(x, ir.Value):
        return like(other, x)
    return op.CastLike(x, other) if other.dtype is None else cast(x, other.dtype)


def _log1p(x: Any) -> Any:
    """Goldberg, "What every computer scientist should know about floating-point arithmetic", 1991,
    theorem 4: what `1 + x` rounds off is divided out.
    """
    one = like(x, 1.0)
    total = op.Add(x, one)
    kept = op.Sub(total, one)
    ratio = op.Div(x, op.Where(op.Equal(kept, like(x, 0.0)), one, kept))
    corrected = op.Where(op.Equal(kept, like(x, 0.0)), x, op.Mul(op.Log(total), ratio))
    return op.Where(op.Greater(op.Abs(x), like(x, 0.5)), op.Log(total), corrected)


def _expm1(x: Any) -> Any:
    """Kahan's: the rounding of exp(x) is divided out by its own logarithm."""
    zero, one = like(x, 0.0), like(x, 1.0)
    grown = op.Exp(x)
    plain = op.Sub(grown, one)
    is_small = op.Less(op.Abs(x), like(x, 0.5))
    log = op.Log(op.Where(is_small, grown, one))
    is_zero = op.Equal(log, zero)
    corrected = op.Where(is_zero, x, op.Div(op.Mul(plain, x), op.Where(is_zero, one, log)))
    return op.Where(is_small, corrected, plain)


def _softplus(x: Any) -> Any:
    """log(1 + exp(x)), for any x."""
    return op.Add(op.Relu(x), _log1p(op.Exp(op.Neg(op.Abs(x)))))


STABLE.rule(aten.log1p.default)(in_fp32(_log1p))
STABLE.rule(aten.expm1.default)(in_fp32(_expm1))


@STABLE.rule(aten.log2.default)
@in_fp32
def _log2(x: Any) -> Any:
    return op.Div(op.Log(x), like(x, math.log(2)))


@STABLE.rule(aten.log10.default)
@in_fp32
def _log10(x: Any) -> Any:
    return op.Div(op.Log(x), like(x, math.log(10)))


@STABLE.rule(aten.deg2rad.default)
@in_fp32
def _deg2rad(x: Any) -> Any:
    return op.Mul(x, like(x, math.pi / 180))


@STABLE.rule(aten.rad2deg.default)
@in_fp32
def _rad2deg(x: Any) -> Any:
    return op.Mul(x, like(x, 180 / math.pi))


@STABLE.rule(aten.sinc.default)
@in_fp32
def _sinc(x: Any) -> Any:
    turned, zero = op.Mul(x, like(x, math.pi)), op.Equal(x, like(x, 0.0))
    one = like(x, 1.0)
    return op.Where(zero, one, op.Div(op.Sin(turned), op.Where(zero, one, turned)))


@STABLE.rule(aten.elu.default)
@in_fp32
def _elu(x: Any, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0) -> Any:
    low = op.Mul(_expm1(op.Mul(x, like(x, input_scale))), like(x, alpha * scale))
    return op.Where(op.Greater(x, like(x, 0.0)), op.Mul(x, like(x, scale)), low)


@STABLE.rule(aten.celu.default)
@in_fp32
def _celu(x: Any, alpha: float = 1.0) -> Any:
    low = op.Mul(_expm1(op.Div(x, like(x, alpha))), like(x, alpha))
    return op.Where(op.Greater(x, like(x, 0.0)), x, low)


@STABLE.rule(aten.selu.default)
@in_fp32
def _selu(x: Any) -> Any:
    """Klambauer et al., "Self-normalizing neural networks", 2017."""
    return _elu(x, 1.6732632423543772, 1.0507009873554805)


@STABLE.rule(aten.log_sigmoid.default)
@in_fp32
def _log_sigmoid(x: Any) -> Any:
    return op.Neg(_softplus(op.Neg(x)))


@STABLE.rule(aten.log_sigmoid_forward.default)
def _log_sigmoid_forward(x: Any) -> Any:
    return _log_sigmoid(x), op.Neg(op.Abs(x))


@STABLE.rule(aten.binary_cross_entropy_with_logits.default)
@in_fp32
def _bce_with_logits(
    x: Any, target: Any, weight: Any = None, pos_weight: Any = None, reduction: int = 1
) -> Any:
    """(1 - y) x + (1 + (p - 1) y) softplus(-x)."""
    tensors = [t for t in (x, target, weight, pos_weight) if t is not None]
    if any(tensor.dtype == ir.DataType.DOUBLE for tensor in tensors):
        x = cast(x, ir.DataType.DOUBLE)
    one = like(x, 1.0)
    log_weight = one if pos_weight is None else op.Add(op.Mul(op.Sub(pos_weight, one), target), one)
    loss = op.Add(op.Mul(op.Sub(one, target), x), op.Mul(log_weight, _softplus(op.Neg(x))))
    loss = loss if weight is None else op.Mul(loss, value(weight, x))
    if reduction == 0:
        return loss
    return (op.ReduceMean if reduction == 1 else op.ReduceSum)(loss, keepdims=0)


_ERFCX = (
    1.27697839,
    -0.092763082,
    -0.166031096,
    0.16403584,
    -0.0542119585,
    -0.0079427217,
    0.00868915966,
    0.00104314458,
    -0.00139570695,
    -0.000183654437,
    0.000160803582,
)
"""(1 + 2 x) erfcx(x) for x >= 0, by powers of (x - 2) / (x + 2): fitted by least squares, off by 4
unit roundoffs of fp32 at most."""


@STABLE.rule(aten.special_erfcx.default)
@in_fp32
def _erfcx(x: Any) -> Any:
    """exp(x^2) erfc(x); exp overflows where erfc is 0."""
    two, one, size = like(x, 2.0), like(x, 1.0), op.Abs(x)
    place = op.Div(op.Sub(size, two), op.Add(size, two))
    fit = like(x, _ERFCX[-1])
    for factor in _ERFCX[-2::-1]:
        fit = op.Add(op.Mul(fit, place), like(x, factor))
    right = op.Div(fit, op.Add(op.Mul(size, two), one))
    left = op.Sub(op.Mul(op.Exp(op.Mul(x, x)), two), right)
    return op.Where(op.Less(x, like(x, 0.0)), left, right)


def log_add(x: Any, y: Any, base: float) -> Any:
    """log(base**x + base**y) to that base; equal infinities stay."""
    y = value(y, x)
    apart = op.Where(op.Equal(x, y), like(x, 0.0), op.Neg(op.Abs(op.Sub(x, y))))
    rest = _log1p(op.Exp(op.Mul(apart, like(x, math.log(base)))))
    return op.Add(op.Max(x, y), op.Div(rest, like(x, math.log(base))))


@STABLE.rule(aten.logaddexp.default)
@in_fp32
def _logaddexp(x: Any, y: Any) -> Any:
    return log_add(x, y, math.e)


@STABLE.rule(aten.logaddexp2.default)
@in_fp32
def _logaddexp2(x: Any, y: Any) -> Any:
    return log_add(x, y, 2.0)


def _is_negative(x: Any) -> Any:
    """The sign bit: that of -0.0, which ONNX Runtime's Where does not keep, too."""
    zero = like(x, 0.0)
    return op.Or(op.Less(x, zero), op.Less(op.Reciprocal(x), zero))


@STABLE.rule(aten.signbit.default)
def _signbit(x: Any) -> Any:
    if x.dtype == ir.DataType.BOOL:
        return op.And(x, op.Not(x))
    return _is_negative(x) if x.dtype in REALS else op.Less(x, like(x, 0))


@STABLE.rule(aten.copysign.Tensor, aten.copysign.Scalar)
@in_fp32
def _copysign(x: Any, y: Any) -> Any:
    size = op.Abs(x)
    return op.Where(_is_negative(value(y, x)), op.Neg(size), size)


def _atan(x: Any, dtype: ir.DataType) -> Any:
    """ONNX Runtime has no kernel for fp64: there one step of Newton's corrects that of fp32."""
    if dtype != ir.DataType.DOUBLE:
        return op.Atan(x)
    near = op.Cast(op.Atan(op.Cast(x, to=int(FLOAT))), to=int(dtype))
    sine, cosine = op.Sin(near), op.Cos(near)
    large = op.Greater(op.Abs(x), scalar(1e30, dtype))  # further, fp32 ends
    clipped = op.Clip(x, scalar(-1e30, dtype), scalar(1e30, dtype))
    rest = op.Sub(op.Mul(clipped, cosine), sine)
    step = op.Div(rest, op.Add(cosine, op.Mul(clipped, sine)))
    end = op.Mul(op.Sign(x), scalar(math.pi / 2, dtype))
    return op.Where(large, end, op.Add(near, step))


@STABLE.rule(aten.atan.default)
def _atan_of(x: Any) -> Any:
    return _atan(x, x.dtype)


@STABLE.rule(aten.atan2.default)
@in_fp32
def _atan2(y: Any, x: Any) -> Any:
    """C99, F.9.1.4, without the cases of two infinities."""
    x = value(x, y)
    zero, half = like(y, 0.0), like(y, math.pi / 2)
    pi = op.Where(_is_negative(y), like(y, -math.pi), like(y, math.pi))
    ratio = op.Div(y, op.Where(op.Equal(x, zero), like(y, 1.0), x))
    angle = _atan(ratio, y.dtype)
    on_axis = op.Where(
        op.Equal(y, zero),
        op.Where(_is_negative(x), pi, y),
        op.Mul(op.Sign(y), half),
    )
    aside = op.Where(op.Less(x, zero), op.Add(angle, pi), angle)
    found = op.Where(op.Equal(x, zero), on_axis, aside)
    return op.Where(op.IsNaN(op.Add(x, y)), op.Add(x, y), found)


@STABLE.rule(aten.angle.default)
def _angle(x: Any) -> Any:
    """0 or pi, of real numbers; NaN of NaN."""
    x = x if x.dtype in REALS else cast(x, FLOAT)
    turned = op.Where(op.Less(x, like(x, 0.0)), like(x, math.pi), like(x, 0.0))
    return op.Where(op.IsNaN(x), x, turned)


@STABLE.rule(aten.hypot.default)
@in_fp32
def _hypot(x: Any, y: Any) -> Any:
    """With the larger side divided out: the squares would leave the range."""
    x, y = op.Abs(x), op.Abs(value(y, x))
    large, zero = op.Max(x, y), like(x, 0.0)
    by = op.Where(op.Equal(large, zero), like(x, 1.0), large)
    small = op.Div(op.Min(x, y), by)
    return op.Mul(large, op.Sqrt(op.Add(op.Mul(small, small), like(x, 1.0))))


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


@STABLE.rule(aten.remainder.Tensor, aten.remainder.Scalar)
@in_fp32
def _remainder(x: Any, y: Any) -> Any:
    x, y = _pair(x, y)
    return _remainder_of(x, y) if x.dtype in REALS else op.Mod(x, y)


@STABLE.rule(aten.floor_divide.default, aten.floor_divide.Scalar)
@in_fp32
def _floor_divide(x: Any, y: Any) -> Any:
    x, y = _pair(x, y)
    if x.dtype in REALS:
        return _floor_div_of(x, y)
    if x.dtype in NARROW:  # -128 less its remainder is no int8
        wide: Any = _floor_divide(cast(x, ir.DataType.INT32), cast(y, ir.DataType.INT32))
        return cast(wide, x.dtype)
    return op.Div(op.Sub(x, op.Mod(x, y)), y)


@STABLE.rule(aten.div.Tensor_mode, aten.div.Scalar_mode)
@in_fp32
def _div(x: Any, y: Any, rounding_mode: str | None = None) -> Any:
    if rounding_mode == "floor":
        quotient: Any = _floor_divide(x, y)
        return quotient
    x, y = _pair(x, y)
    if x.dtype in REALS:
        quotient = op.Div(x, y)
        if rounding_mode == "trunc":  # ONNX has no Trunc
            return op.Mul(op.Sign(quotient), op.Floor(op.Abs(quotient)))
        return quotient
    if rounding_mode == "trunc":
        return op.Div(x, y)
    return op.Div(op.Cast(x, to=int(FLOAT)), op.Cast(y, to=int(FLOAT)))


def _pair(x: Any, y: Any) -> tuple[Any, Any]:
    """Two operands in one dtype: that of a number follows the tensor, or is fp32."""
    if isinstance(y, float) and x.dtype not in REALS:
        x = cast(x, FLOAT)
    if isinstance(y, ir.Value) and y.dtype in REALS and x.dtype not in REALS:
        x = cast(x, y.dtype)
    return x, value(y, x)


DOUBLE = ir.DataType.DOUBLE


@STABLE.rule(aten.arange.start_step)
def _arange(start: Any, end: Any, step: Any = 1, dtype: int = -1, **_: Any) -> Any:
    """Counted in fp64, as torch does: in fp32, 7 / 0.7 is more than 10."""
    parts = start, end, step
    if all(_is_whole(part) for part in parts):
        first, last, by = (_number(part, ir.DataType.INT64) for part in parts)
        numbers = op.Range(first, last, by)
        return numbers if dtype in (-1, ir.DataType.INT64) else op.Cast(numbers, to=dtype)
    wanted = int(FLOAT) if dtype == -1 else dtype
    if any(isinstance(part, ir.Value) and part.dtype in REALS for part in parts):
        numbers = op.Range(*(_number(part, FLOAT) for part in parts))  # it was computed in fp32
        return op.Cast(numbers, to=wanted)
    first, last, by = (_number(part, DOUBLE) for part in parts)
    count = op.Cast(op.Ceil(op.Div(op.Sub(last, first), by)), to=int(ir.DataType.INT64))
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
    if dtype == ir.DataType.INT64:
        return op.Constant(value_int=part)
    return scalar(float(part), dtype)
