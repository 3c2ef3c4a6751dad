"""The syntax tree of a function that is in memory, with the line numbers of its file."""

import ast
import functools
import inspect
import linecache
from types import CodeType
from typing import TypeAlias

from enginecast.capture.findings import Finding

FunctionNode: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


@functools.lru_cache(maxsize=4096)
def function_node(code: CodeType) -> FunctionNode | None:
    """The definition that `code` was compiled from; None when its source is not there.

    Only the lines of the function are parsed: files of models are long.  A file that has changed
    since it was imported is told by the name that is found.
    """
    lines = linecache.getlines(code.co_filename)
    first = code.co_firstlineno
    if not 0 < first <= len(lines):
        return None
    try:
        block = inspect.getblock(lines[first - 1 :])
    except (SyntaxError, IndentationError, ValueError):
        return None
    tree = _parse(block)
    if tree is None and code.co_name == "<lambda>":
        tree = _parse(_whole_statement(lines, first))
    if tree is None:
        return None
    ast.increment_lineno(tree, first - 2)
    return _find(tree, code)


def _parse(block: list[str]) -> ast.Module | None:
    """Lines of any indentation; the tree's lines start at 2."""
    is_indented = block and block[0][:1].isspace()
    opening = "if True:\n" if is_indented else "\n"
    try:
        return ast.parse(opening + "".join(block))
    except (SyntaxError, ValueError):
        return None


def _whole_statement(lines: list[str], first: int) -> list[str]:
    """The line of a lambda alone, which `inspect.getblock` may cut within its statement."""
    return [lines[first - 1].strip().rstrip(",") + "\n"]


def _find(tree: ast.Module, code: CodeType) -> FunctionNode | None:
    if code.co_name == "<lambda>":
        names = code.co_varnames[: code.co_argcount]
        found = [
            node
            for node in ast.walk(tree)
            if isinstance(node, ast.Lambda)
            and node.lineno == code.co_firstlineno
            and tuple(a.arg for a in (*node.args.posonlyargs, *node.args.args)) == names
        ]
        return found[0] if len(found) == 1 else None
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == code.co_name:
            return node
    return None


def line_of(file: str, line: int) -> str:
    """The text of a line, without its comment mark left out: as it stands."""
    return linecache.getline(file, line).strip()


def not_scanned(code: CodeType, name: str, path: str) -> Finding:
    """Tells that there is no source to look into."""
    return Finding(
        kind="not-scanned",
        file=code.co_filename,
        line=code.co_firstlineno,
        code="",
        function=name,
        module=path,
        tensor="",
        decides="unknown",
        witnesses=("scan",),
        action="not looked into: its source is not available",
    )
