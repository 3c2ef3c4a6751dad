"""The largest that a dimension can be: "2*sequence + 1" by the ranges of its symbols."""

import ast
import math
import operator
from collections.abc import Callable, Mapping
from itertools import product

import onnx_ir as ir

Ranges = Mapping[str, tuple[int, int]]
Bounds = tuple[float, float]
_BINARY: Mapping[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Pow: operator.pow,
}
_CALLS: Mapping[str, Callable[..., float]] = {
    "max": max,
    "min": min,
    "floor": math.floor,
    "ceil": math.ceil,
    "ceiling": math.ceil,
    "abs": abs,
    "trunc": math.trunc,
}


def bounds(size: int | ir.SymbolicDim, ranges: Ranges) -> Bounds | None:
    """Least and greatest of a dimension, or numbers outside of them where a symbol occurs twice.

    None: it is not known, has a symbol without a range, or is written in a way that is not read.
    """
    if isinstance(size, int):
        return size, size
    try:
        parsed = ast.parse(str(size.value), mode="eval")
        return _evaluate(parsed.body, ranges)
    except (SyntaxError, KeyError, TypeError, ZeroDivisionError, OverflowError):
        return None


def volume(shape: ir.Shape | None, ranges: Ranges) -> int | None:
    """The most elements that a tensor of this shape can have; None: that is not known."""
    if shape is None:
        return None
    most = 1
    for size in shape:
        found = bounds(size, ranges)
        if found is None or not math.isfinite(found[1]):
            return None
        most *= max(int(found[1]), 0)
    return most


def _evaluate(node: ast.AST, ranges: Ranges) -> Bounds:
    """Bounds of an expression.

    Raises:
        KeyError: a symbol has no range, or what it is is not known here.
    """
    match node:
        case ast.Constant(value=int() | float() as number):
            return number, number
        case ast.Name(id=name):
            return ranges[name]
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            least, most = _evaluate(operand, ranges)
            return -most, -least
        case ast.BinOp(left=left, op=ast.Mod(), right=right):
            _evaluate(left, ranges)
            return 0, max(_evaluate(right, ranges)[1] - 1, 0)
        case ast.BinOp(left=left, op=op, right=right):
            return _corners(_BINARY[type(op)], _evaluate(left, ranges), _evaluate(right, ranges))
        case ast.Call(func=ast.Name(id=name), args=args):
            return _corners(_CALLS[name.lower()], *(_evaluate(a, ranges) for a in args))
    raise KeyError(type(node).__name__)


def _corners(function: Callable[..., float], *given: Bounds) -> Bounds:
    """Of a function that grows or falls with each of its arguments."""
    values = [function(*numbers) for numbers in product(*given)]
    return min(values), max(values)
