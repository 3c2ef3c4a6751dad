"""How arithmetic of Python's integers is said in ONNX, where torch's exporter says it otherwise."""

import operator
from collections.abc import Callable
from typing import Any

from onnxscript import opset23 as op


def _floor_divide(left: Any, right: Any) -> Any:
    """`left // right` of integers: rounds down, while ONNX's Div rounds to zero."""
    multiple = op.Sub(left, op.Mod(left, right))  # Mod has the sign of the divisor, as Python's %
    return op.Div(multiple, right)


def number_translations() -> dict[Callable[..., Any], Callable[..., Any]]:
    """By Python operator."""
    return {operator.floordiv: _floor_divide}
