"""Conditions on input sizes, in a small subset of Python.

A bundle is data: nothing in it is run.  So a condition is parsed, and walked here.
"""

import ast
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from enginecast.errors import InputError, shortened
from enginecast.runtime.bundle.manifest import SizeCheck

_BINARY: Mapping[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Div: operator.truediv,
    ast.Mod: operator.mod,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_CALLS: Mapping[str, Callable[..., Any]] = {
    "max": max,
    "min": min,
    "abs": abs,
    "float": float,
    "math.trunc": math.trunc,
    "math.floor": math.floor,
    "math.ceil": math.ceil,
    "math.sqrt": math.sqrt,
}


def check_sizes(checks: Sequence[SizeCheck], sizes: Mapping[str, int]) -> None:
    """Raise InputError where the sizes of the inputs break a condition, or it cannot be read."""
    for check in checks:
        if not holds(check.condition, sizes):
            found = ", ".join(f"{n} = {size}" for n, size in sizes.items() if n in check.condition)
            place = f" ({check.place})" if check.place else ""
            raise InputError(
                f"inputs: expected sizes with {shortened(check.condition)}, got {found}",
                hint=f"With other sizes, the model's code{place} may take another path.",
            )


def holds(condition: str, sizes: Mapping[str, int]) -> bool:
    """Whether sizes satisfy a condition; False if the condition cannot be parsed."""
    try:
        return bool(_value(ast.parse(condition, mode="eval").body, sizes))
    except (SyntaxError, KeyError, TypeError, ValueError, ArithmeticError, RecursionError):
        return False
    except MemoryError:  # of Python's parser, for what is nested too deep
        return False


def _value(node: ast.expr, sizes: Mapping[str, int]) -> Any:
    match node:
        case ast.Constant(value=int() | float()):
            return node.value
        case ast.Name():
            return sizes[node.id]
        case ast.BinOp():
            return _BINARY[type(node.op)](_value(node.left, sizes), _value(node.right, sizes))
        case ast.Compare(ops=[op], comparators=[right]):
            return _BINARY[type(op)](_value(node.left, sizes), _value(right, sizes))
        case ast.BoolOp():
            found = [_value(value, sizes) for value in node.values]
            return all(found) if isinstance(node.op, ast.And) else any(found)
        case ast.UnaryOp(op=ast.Not()):
            return not _value(node.operand, sizes)
        case ast.UnaryOp(op=ast.USub()):
            return -_value(node.operand, sizes)
        case ast.Call(keywords=[]):
            return _CALLS[ast.unparse(node.func)](*(_value(arg, sizes) for arg in node.args))
    raise ValueError(ast.unparse(node))
