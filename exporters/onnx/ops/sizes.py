"""What code computes from sizes, which are int64, and numbers: torch.onnx has no form for some of
it, and fails on numbers where it wants tensors.  And loops, whose counts are such numbers.
"""

import operator
from collections.abc import Sequence
from typing import Any

import onnx_ir as ir
import torch
from onnxscript import opset23 as op

from enginecast.exporters.onnx.ops.recurrent import HOP
from enginecast.exporters.onnx.ops.registry import form
from enginecast.exporters.onnx.ops.values import BOOL, FLOAT, INT64
from enginecast.library_names import higher_order, private


@form(operator.floordiv)
def _floor_divide(left: Any, right: Any) -> Any:
    """`left // right` of integers: rounds down, while ONNX's Div rounds to zero."""
    multiple = op.Sub(left, op.Mod(left, right))  # Mod has the sign of the divisor, as Python's %
    return op.Div(multiple, right)


def _whole(size: Any) -> Any:
    return size if isinstance(size, ir.Value) else op.Constant(value_int=int(size))


@form(torch.sym_sqrt)
def _root(size: Any) -> Any:
    return op.Sqrt(op.Cast(_whole(size), to=int(FLOAT)))


@form(round)
def _rounded(number: Any, digits: int | None = None) -> Any:
    """Halves go to even numbers, as in Python."""
    if number.dtype == INT64:
        return op.Identity(number)
    assert digits is None  # torch.export gives no other
    return op.Cast(op.Round(number), to=int(INT64))


def _power_of_two(exponent: Any) -> Any:
    return op.Pow(op.Constant(value_int=2), _whole(exponent))


@form(operator.lshift)
def _doubled(size: Any, times: Any) -> Any:
    return op.Mul(_whole(size), _power_of_two(times))


@form(operator.rshift)
def _halved(size: Any, times: Any) -> Any:
    """Rounds down, as Python does for negative numbers, too."""
    whole, divisor = _whole(size), _power_of_two(times)
    return op.Div(op.Sub(whole, op.Mod(whole, divisor)), divisor)


@form(operator.and_)
def _and(left: Any, right: Any) -> Any:
    if _is_bool(left, right):
        return op.And(left, right)
    return op.BitwiseAnd(_whole(left), _whole(right))


@form(operator.or_)
def _or(left: Any, right: Any) -> Any:
    if _is_bool(left, right):
        return op.Or(left, right)
    return op.BitwiseOr(_whole(left), _whole(right))


def _is_bool(left: Any, right: Any) -> bool:
    return all(isinstance(each, ir.Value) and each.dtype == BOOL for each in (left, right))


@form(higher_order("while_loop"))
def _while_loop(
    condition: Any, body: Any, carried: Sequence[Any], additional: Sequence[Any]
) -> Sequence[Any]:
    """torch's own translation, with its one wrong number put right.

    It calls the condition before the loop as a function of opset 23's version, and all other calls
    have version 1.  torch's inliner refuses a model whose loop holds a branch or another loop then
    ("Opset mismatch when inlining function", torch 2.13; pytorch/pytorch#162645 made it).
    """
    translate = private(f"{HOP}.higher_order_while_loop", "a loop")
    results: Sequence[Any] = translate(condition, body, carried, additional)
    results[0].producer().inputs[1].producer().version = None
    return results
