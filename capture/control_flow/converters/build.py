"""Pieces of new code."""

import ast
from collections.abc import Sequence
from typing import Any, TypeVar

GLUE = "_ec_glue"
Placed = TypeVar("Placed", bound=ast.AST)


def names_tuple(names: Sequence[str]) -> ast.Tuple:
    return ast.Tuple(elts=[ast.Name(name, ast.Load()) for name in names], ctx=ast.Load())


def strings(names: Sequence[str]) -> ast.Tuple:
    return ast.Tuple(elts=[ast.Constant(value=name) for name in names], ctx=ast.Load())


def constants(values: Sequence[int]) -> ast.Tuple:
    return ast.Tuple(elts=[ast.Constant(value=value) for value in values], ctx=ast.Load())


def bind(names: Sequence[str], call: ast.expr) -> ast.stmt:
    if not names:
        return ast.Expr(value=call)
    target = ast.Tuple(elts=[ast.Name(name, ast.Store()) for name in names], ctx=ast.Store())
    return ast.Assign(targets=[target], value=call)


def undefined(names: Sequence[str]) -> list[ast.stmt]:
    value = ast.Attribute(ast.Name(GLUE, ast.Load()), "UNDEFINED", ast.Load())
    return [ast.Assign(targets=[ast.Name(name, ast.Store())], value=value) for name in names]


def loaded(base: ast.expr) -> ast.expr:
    return ast.parse(ast.unparse(base), mode="eval").body


def glue(name: str, *arguments: ast.expr) -> ast.Call:
    """A call of the glue."""
    function = ast.Attribute(ast.Name(GLUE, ast.Load()), name, ast.Load())
    return ast.Call(func=function, args=list(arguments), keywords=[])


def later(value: ast.expr) -> ast.Lambda:
    """A function without arguments that gives `value`."""
    nothing = ast.arguments(posonlyargs=[], args=[], kwonlyargs=[], kw_defaults=[], defaults=[])
    return ast.Lambda(args=nothing, body=value)


def place_at(node: Placed, place: ast.AST) -> Placed:
    """Give `node`, and what is new below it, the first line of `place`.

    Python takes the last line of what is called for the line of a call.
    """
    ast.copy_location(node, place)
    made: Any = node
    made.end_lineno, made.end_col_offset = made.lineno, made.col_offset
    ast.fix_missing_locations(node)
    return node
