"""Branches that only raise: `if x.isnan().any(): raise ValueError(...)` is a check of the inputs.

There is nothing to compute on such a path, and nothing to compare with eager, unless a caller
catches the error and goes on.
"""

import ast
import functools
import sys
from collections.abc import Iterator, Sequence
from types import FrameType

from enginecast.capture.python.locations import SourceLocation, is_model_code, tree_of

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


def checks(tree: ast.AST) -> frozenset[ast.If]:
    """The branches of which one path ends with an error, in the branch or in what follows it."""
    return frozenset(
        found
        for node in ast.walk(tree)
        for _, block in ast.iter_fields(node)
        if isinstance(block, list)
        for place, statement in enumerate(block)
        if isinstance(statement, ast.If)
        for found in _checks_of(statement, block[place + 1 :])
    )


def _checks_of(node: ast.If, rest: Sequence[ast.stmt]) -> Iterator[ast.If]:
    """Those among an `if` and its `elif`s, which `rest` follows."""
    if raises(node.body) or raises(node.orelse or rest):
        yield node
    if len(node.orelse) == 1 and isinstance(node.orelse[0], ast.If):
        yield from _checks_of(node.orelse[0], rest)


def caught_at() -> str:
    """The innermost place, among the model's functions that run now, which catches an error and
    goes on; empty if there is none.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if str(frame.f_globals.get("__name__")).startswith("torch.export"):
            return ""  # above it is who traces the model
        file = frame.f_code.co_filename
        if is_model_code(file) and frame.f_lineno in _caught(file):
            return str(SourceLocation(file, frame.f_lineno))
        frame = frame.f_back
    return ""


@functools.lru_cache(maxsize=256)
def _caught(file: str) -> frozenset[int]:
    """The lines of a file on which an error does not end what a function computes."""
    return frozenset(
        line
        for node in ast.walk(tree_of(file))
        if (isinstance(node, ast.With) and any("suppress" in ast.unparse(i) for i in node.items))
        or (
            isinstance(node, ast.Try)
            and not all(isinstance(handler.body[-1], ast.Raise) for handler in node.handlers)
        )
        for part in node.body
        for line in range(part.lineno, (part.end_lineno or part.lineno) + 1)
    )
