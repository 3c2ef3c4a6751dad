"""Tests in a model's code that ask for a dtype before they ask for values."""

import ast


def asked_of_dtypes(test: ast.expr) -> tuple[ast.expr, ast.expr] | None:
    """`x.dtype == torch.float16 and not isfinite(x).all()` as its two halves; None for others.

    A program is captured in one dtype, in which the second half is asked always or never.
    """
    if not isinstance(test, ast.BoolOp) or not isinstance(test.op, ast.And):
        return None
    first, *others = test.values
    if not isinstance(first, ast.Compare) or not isinstance(first.left, ast.Attribute):
        return None
    if first.left.attr != "dtype" or any(isinstance(part, ast.Call) for part in ast.walk(first)):
        return None
    rest = others[0] if len(others) == 1 else ast.BoolOp(ast.And(), others)
    return first, ast.copy_location(rest, others[0])
