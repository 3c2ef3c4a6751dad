"""What code computes from sizes, which are int64, and numbers: torch.onnx has no form for some of
it, and fails on numbers where it wants tensors.
"""

import operator
from typing import Any

import onnx_ir as ir
import torch
from onnxscript import opset23 as op

from enginecast.exporters.onnx.ordered import BOOL, INT64
from enginecast.exporters.onnx.stable import FLOAT, STABLE


def _whole(size: Any) -> Any:
    return size if isinstance(size, ir.Value) else op.Constant(value_int=int(size))


@STABLE.rule(torch.sym_sqrt)
def _root(size: Any) -> Any:
    return op.Sqrt(op.Cast(_whole(size), to=int(FLOAT)))


@STABLE.rule(round)
def _rounded(number: Any, digits: int | None = None) -> Any:
    """Halves go to even numbers, as in Python."""
    if number.dtype == INT64:
        return op.Identity(number)
    assert digits is None  # torch.export gives no other
    return op.Cast(op.Round(number), to=int(INT64))


def _power_of_two(exponent: Any) -> Any:
    return op.Pow(op.Constant(value_int=2), _whole(exponent))


@STABLE.rule(operator.lshift)
def _doubled(size: Any, times: Any) -> Any:
    return op.Mul(_whole(size), _power_of_two(times))


@STABLE.rule(operator.rshift)
def _halved(size: Any, times: Any) -> Any:
    """Rounds down, as Python does for negative numbers, too."""
    whole, divisor = _whole(size), _power_of_two(times)
    return op.Div(op.Sub(whole, op.Mod(whole, divisor)), divisor)


@STABLE.rule(operator.and_)
def _and(left: Any, right: Any) -> Any:
    if _is_bool(left, right):
        return op.And(left, right)
    return op.BitwiseAnd(_whole(left), _whole(right))


@STABLE.rule(operator.or_)
def _or(left: Any, right: Any) -> Any:
    if _is_bool(left, right):
        return op.Or(left, right)
    return op.BitwiseOr(_whole(left), _whole(right))


def _is_bool(left: Any, right: Any) -> bool:
    return all(isinstance(each, ir.Value) and each.dtype == BOOL for each in (left, right))
