"""The statements of a model's source: which statement is at a line, and what it branches on.

Only lines that a recorder or torch named are looked up; nothing is interpreted.
"""

import ast
import functools
from collections.abc import Iterator, Mapping
from contextlib import suppress
from types import CodeType
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from enginecast.capture.control_flow.detect.findings import Kind
from enginecast.capture.python.locations import (
    SourceLocation,
    is_model_code,
    noting_calls,
    real_path,
    tree_of,
)
from enginecast.capture.python.recompile import first_line

Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef
DECIDING: Mapping[type[ast.AST], tuple[Kind, str]] = {
    ast.If: ("if", "test"),
    ast.While: ("while", "test"),
    ast.For: ("for", "iter"),
    ast.IfExp: ("ternary", "test"),
    ast.Assert: ("assert", "test"),
}
"""Statements and expressions with several paths: name, and field of the deciding expression."""
NUMBERS = frozenset({"int", "float", "bool", "item"})
"""Functions and methods that return a Python number from a tensor."""
SIZES = frozenset({"shape", "size", "numel", "len", "ndim", "dim", "range"})


def statement_at(place: SourceLocation) -> tuple[Kind, str] | None:
    """Kind and deciding expression of the branch at a line; None if there is none."""
    return _statements(real_path(place.file)).get(place.line)


@functools.lru_cache(maxsize=256)
def _statements(file: str) -> dict[int, tuple[Kind, str]]:
    found: dict[int, tuple[Kind, str]] = {}
    for node in ast.walk(tree_of(file)):  # outer ones first, so that the innermost stays
        if isinstance(node, ast.Try) and node.handlers:
            found |= {line: ("try", "") for part in node.body for line in _span(part)}
        if isinstance(node, ast.comprehension):
            for test in node.ifs:
                found |= {line: ("comprehension", ast.unparse(test)) for line in _span(test)}
        if type(node) in DECIDING:
            kind, field = DECIDING[type(node)]
            test = getattr(node, field)
            found |= {line: (kind, ast.unparse(test)) for line in _span(test)}
    return found


def numbers_decide(place: SourceLocation) -> Iterator[SourceLocation]:
    """Later branches in the same function on a number that was read from a tensor at a line.

    Only a name bound to the number itself is followed, through arithmetic and comparisons.
    """
    file, line = place.resolved
    functions = [n for n in ast.walk(tree_of(file)) if isinstance(n, Function) and line in _span(n)]
    if not functions:
        return
    function = max(functions, key=lambda each: each.lineno)
    names: set[str] = set()

    def is_named(value: ast.expr) -> bool:
        return isinstance(value, ast.Name) and value.id in names

    def is_read(value: ast.expr) -> bool:
        called = value.func if isinstance(value, ast.Call) else None
        return getattr(called, "attr", getattr(called, "id", "")) in NUMBERS

    for node in _in_order(function):
        if isinstance(node, ast.Assign):
            parts = list(_operands(node.value))
            if (line in _span(node) and any(map(is_read, parts))) or any(map(is_named, parts)):
                names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif type(node) in DECIDING and type(node) is not ast.For:
            test = getattr(node, DECIDING[type(node)][1])
            if test.lineno > line and any(map(is_named, _operands(test))):
                yield SourceLocation(file, test.lineno)


def sizes_decide(module: nn.Module, inputs: Mapping[str, Tensor]) -> tuple[SourceLocation, ...]:
    """Places where tensor sizes may decide a branch, in the functions that a run of `module`
    enters.
    """
    found: dict[SourceLocation, None] = {}
    for code in entered(module, inputs):
        if not is_model_code(code.co_filename):
            continue
        file = real_path(code.co_filename)
        for node in ast.walk(tree_of(file)):
            if isinstance(node, ast.FunctionDef) and first_line(node) == code.co_firstlineno:
                found |= dict.fromkeys(SourceLocation(file, line) for line in _by_size(node))
    return tuple(found)


def _by_size(function: ast.FunctionDef) -> Iterator[int]:
    names: set[str] = set()
    for node in _in_order(function):
        if isinstance(node, ast.Assign) and _mentions(node.value, names | SIZES):
            targets = [part for target in node.targets for part in ast.walk(target)]
            names |= {part.id for part in targets if isinstance(part, ast.Name)}
        elif isinstance(node, ast.For):
            yield node.iter.lineno
        elif isinstance(node, ast.If | ast.While | ast.IfExp) and _mentions(
            node.test, names | SIZES
        ):
            yield node.test.lineno


def _in_order(function: Function) -> list[Any]:
    nodes: list[Any] = [
        node for node in ast.walk(function) if isinstance(node, ast.stmt | ast.expr)
    ]
    return sorted(nodes, key=lambda node: (node.lineno, node.col_offset))


def entered(module: nn.Module, inputs: Mapping[str, Tensor]) -> set[CodeType]:
    """The code of every Python function that a run enters."""
    codes: set[CodeType] = set()
    # An error ends the run; what was entered before counts all the same.
    with noting_calls(lambda frame: codes.add(frame.f_code)), torch.no_grad(), suppress(Exception):
        module(**inputs)
    return codes


def _span(node: Any) -> range:
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


def _operands(value: ast.expr) -> Iterator[ast.expr]:
    """The operands of arithmetic, comparisons and `and`, `or`, `not`."""
    if isinstance(value, ast.BoolOp | ast.BinOp | ast.UnaryOp | ast.Compare | ast.IfExp):
        for part in ast.iter_child_nodes(value):
            if isinstance(part, ast.expr):
                yield from _operands(part)
    else:
        yield value


def _mentions(value: ast.expr, names: frozenset[str] | set[str]) -> bool:
    return any(
        (isinstance(part, ast.Name) and part.id in names)
        or (isinstance(part, ast.Attribute) and part.attr in names)
        for part in ast.walk(value)
    )
