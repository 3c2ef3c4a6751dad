"""Branches that only raise: `if x.isnan().any(): raise ValueError(...)` is a check of the inputs.

There is nothing to compute on such a path, and nothing to compare with eager.
"""

import ast
from collections.abc import Sequence

LEAVES = (ast.Return, ast.Break, ast.Continue)


def raises(body: Sequence[ast.stmt]) -> bool:
    """Whether every way through a block ends with an error."""
    if not body or any(isinstance(part, LEAVES) for node in body for part in ast.walk(node)):
        return False
    last = body[-1]
    if isinstance(last, ast.If):
        return raises(last.body) and raises(last.orelse)
    if isinstance(last, ast.Assert):  # assert False
        return isinstance(last.test, ast.Constant) and not last.test.value
    return isinstance(last, ast.Raise) and last.exc is not None
