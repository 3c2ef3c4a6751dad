"""Statements that give names to functions, modules and nothing."""

import ast
import sys
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from enginecast.capture.taint import CLEAN, Value, constant
from enginecast.capture.taint_frame import Frame, Local

NEXT = frozenset({"next"})


def _define(node: ast.FunctionDef | ast.AsyncFunctionDef, frame: Frame) -> frozenset[str]:
    frame.names[node.name] = Value(const=Local(node, frame))
    return NEXT


def _import(node: ast.Import | ast.ImportFrom, frame: Frame) -> frozenset[str]:
    """An import within a function: what is loaded already is known."""
    for alias in node.names:
        name = alias.asname or alias.name.split(".")[0]
        if isinstance(node, ast.Import):
            found: Any = sys.modules.get(alias.name if alias.asname else name)
        else:
            found = getattr(sys.modules.get(node.module or ""), alias.name, None)
        frame.names[name] = CLEAN if found is None else constant(found)
    return NEXT


def _delete(node: ast.Delete, frame: Frame) -> frozenset[str]:
    for target in node.targets:
        if isinstance(target, ast.Name):
            frame.names.pop(target.id, None)
        elif isinstance(target, ast.Attribute):
            owner = frame.evaluate(target.value)
            if isinstance(owner.const, nn.Module):
                frame.meet("state", target, owner, blocking=True)
    return NEXT


NAMING: Mapping[type[ast.stmt], Callable[[Any, Frame], frozenset[str]]] = {
    ast.FunctionDef: _define,
    ast.AsyncFunctionDef: _define,
    ast.Import: _import,
    ast.ImportFrom: _import,
    ast.Delete: _delete,
}
