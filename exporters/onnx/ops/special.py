"""Functions of torch.special, and others whose plain formula loses digits or leaves the range.

torch.onnx says log1p(x) as Log(x + 1), which loses all digits of a small x, and logsigmoid as
Log(Sigmoid(x)), which is -inf where torch gives x.  The formulas here are those of the C library
and of torch's own kernels; what computes in 16 bits computes them in fp32, as torch does.
"""

import math
from typing import Any

from onnxscript import opset23 as op

from enginecast.exporters.onnx.ops.registry import form, refuse
from enginecast.exporters.onnx.ops.values import (
    DOUBLE,
    FLOAT,
    REALS,
    cast,
    in_fp32,
    like,
    value,
)
from enginecast.passes.ir.effects import aten


def log1p(x: Any) -> Any:
    """Goldberg, "What every computer scientist should know about floating-point arithmetic", 1991,
    theorem 4: what `1 + x` rounds off is divided out.
    """
    one = like(x, 1.0)
    total = op.Add(x, one)
    kept = op.Sub(total, one)
    ratio = op.Div(x, op.Where(op.Equal(kept, like(x, 0.0)), one, kept))
    corrected = op.Where(op.Equal(kept, like(x, 0.0)), x, op.Mul(op.Log(total), ratio))
    return op.Where(op.Greater(op.Abs(x), like(x, 0.5)), op.Log(total), corrected)


def expm1(x: Any) -> Any:
    """Kahan's: the rounding of exp(x) is divided out by its own logarithm."""
    zero, one = like(x, 0.0), like(x, 1.0)
    grown = op.Exp(x)
    plain = op.Sub(grown, one)
    is_small = op.Less(op.Abs(x), like(x, 0.5))
    log = op.Log(op.Where(is_small, grown, one))
    is_zero = op.Equal(log, zero)
    corrected = op.Where(is_zero, x, op.Div(op.Mul(plain, x), op.Where(is_zero, one, log)))
    return op.Where(is_small, corrected, plain)


def softplus(x: Any) -> Any:
    """log(1 + exp(x)), for any x."""
    return op.Add(op.Relu(x), log1p(op.Exp(op.Neg(op.Abs(x)))))


form(aten.log1p.default)(in_fp32(log1p))
form(aten.expm1.default)(in_fp32(expm1))


@form(aten.log2.default)
@in_fp32
def _log2(x: Any) -> Any:
    return op.Div(op.Log(x), like(x, math.log(2)))


@form(aten.log10.default)
@in_fp32
def _log10(x: Any) -> Any:
    return op.Div(op.Log(x), like(x, math.log(10)))


@form(aten.deg2rad.default)
@in_fp32
def _deg2rad(x: Any) -> Any:
    return op.Mul(x, like(x, math.pi / 180))


@form(aten.rad2deg.default)
@in_fp32
def _rad2deg(x: Any) -> Any:
    return op.Mul(x, like(x, 180 / math.pi))


@form(aten.sinc.default)
@in_fp32
def _sinc(x: Any) -> Any:
    turned, zero = op.Mul(x, like(x, math.pi)), op.Equal(x, like(x, 0.0))
    one = like(x, 1.0)
    return op.Where(zero, one, op.Div(op.Sin(turned), op.Where(zero, one, turned)))


def log_add(x: Any, y: Any, base: float) -> Any:
    """log(base**x + base**y) to that base; equal infinities stay."""
    y = value(y, x)
    apart = op.Where(op.Equal(x, y), like(x, 0.0), op.Neg(op.Abs(op.Sub(x, y))))
    rest = log1p(op.Exp(op.Mul(apart, like(x, math.log(base)))))
    return op.Add(op.Max(x, y), op.Div(rest, like(x, math.log(base))))


@form(aten.logaddexp.default)
@in_fp32
def _logaddexp(x: Any, y: Any) -> Any:
    return log_add(x, y, math.e)


def _is_negative(x: Any) -> Any:
    """The sign bit: that of -0.0, which ONNX Runtime's Where does not keep, too."""
    zero = like(x, 0.0)
    return op.Or(op.Less(x, zero), op.Less(op.Reciprocal(x), zero))


def _refuse_fp64(x: Any) -> None:
    if x.dtype == DOUBLE:
        raise ValueError("ONNX Runtime (1.31) has no Atan of fp64")


@form(aten.atan.default)
def _atan(x: Any) -> Any:
    _refuse_fp64(x)
    return op.Atan(x)


@form(aten.atan2.default)
@in_fp32
def _atan2(y: Any, x: Any) -> Any:
    """C99, F.9.1.4, without the cases of two infinities."""
    _refuse_fp64(y)
    x = value(x, y)
    zero, half = like(y, 0.0), like(y, math.pi / 2)
    pi = op.Where(_is_negative(y), like(y, -math.pi), like(y, math.pi))
    ratio = op.Div(y, op.Where(op.Equal(x, zero), like(y, 1.0), x))
    angle = op.Atan(ratio)
    on_axis = op.Where(
        op.Equal(y, zero),
        op.Where(_is_negative(x), pi, y),
        op.Mul(op.Sign(y), half),
    )
    aside = op.Where(op.Less(x, zero), op.Add(angle, pi), angle)
    found = op.Where(op.Equal(x, zero), on_axis, aside)
    return op.Where(op.IsNaN(op.Add(x, y)), op.Add(x, y), found)


@form(aten.angle.default)
def _angle(x: Any) -> Any:
    """0 or pi, of real numbers; NaN of NaN."""
    x = x if x.dtype in REALS else cast(x, FLOAT)
    turned = op.Where(op.Less(x, like(x, 0.0)), like(x, math.pi), like(x, 0.0))
    return op.Where(op.IsNaN(x), x, turned)


@form(aten.hypot.default)
@in_fp32
def _hypot(x: Any, y: Any) -> Any:
    """With the larger side divided out: the squares would leave the range."""
    x, y = op.Abs(x), op.Abs(value(y, x))
    large, zero = op.Max(x, y), like(x, 0.0)
    by = op.Where(op.Equal(large, zero), like(x, 1.0), large)
    small = op.Div(op.Min(x, y), by)
    return op.Mul(large, op.Sqrt(op.Add(op.Mul(small, small), like(x, 1.0))))


refuse(
    *(aten.erfinv.default, aten.special_erfinv.default, aten.special_erfcx.default),
    *(aten.erfc.default, aten.special_erfc.default, aten.logaddexp2.default),
    *(aten.i0.default, aten.special_i0.default, aten.special_i0e.default),
    *(aten.special_i1.default, aten.special_i1e.default),
    reason="it has no such function, and the plain formula loses digits",
)
refuse(
    *(aten.copysign.Tensor, aten.copysign.Scalar, aten.signbit.default),
    reason="it does not tell the sign of zero",
)
