"""Where a forward returns: for messages about what it returns."""

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator
from typing import Any


def return_place(forward: Callable[..., Any]) -> str:
    """`FILE:LINE` of the one return statement of a function, or else of its first line.

    Empty where the source is not available.
    """
    function = inspect.unwrap(forward)
    try:
        lines, first = inspect.getsourcelines(function)
        file = inspect.getsourcefile(function)
        [tree] = ast.parse(textwrap.dedent("".join(lines))).body
    except (OSError, TypeError, SyntaxError, ValueError):
        return ""
    found = [node.lineno for node in _returns(tree)]
    return f"{file}:{first + found[0] - 1}" if len(found) == 1 else f"{file}:{first}"


def _returns(node: ast.AST) -> Iterator[ast.Return]:
    """Return statements of a function, without those of functions inside of it."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Return):
            yield child
        elif not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            yield from _returns(child)
