"""Code that asks whether it runs as TorchScript, and may then compute something other than eager.

Such code makes a script differ from eager where nothing else does: torchvision's detectors compute
the size of their images from a factor in fp32 in a script, and in fp64 in eager.
"""

import ast
import functools
import re
from collections.abc import Iterator
from typing import Any

import torch

from enginecast.capture.python.locations import (
    SourceLocation,
    is_model_code,
    origin_of,
    tree_of,
)

_TRACING = re.compile(r"_*is_tracing|_get_tracing_state")
_EITHER = re.compile(rf"_*is_scripting|{_TRACING.pattern}")
_TRACED = re.compile(r"^(?P<file>.+)\((?P<line>\d+)\): ", re.MULTILINE)
"""How a node of a trace names the frames that it was made in."""
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


def questions(module: torch.jit.ScriptModule) -> tuple[SourceLocation, ...]:
    """The lines that ask `torch.jit.is_scripting()` or `is_tracing()` in functions that the module
    has code of; in what is traced, only whether it is traced is of interest.

    Code of torch itself counts only where it is in the branch of a trace, as that of
    `interpolate(recompute_scale_factor=True)`; its other questions choose among equal ways.
    """
    found: dict[SourceLocation, None] = {}
    texts = {node.sourceRange() for node in _nodes(module.inlined_graph)}
    scripted = {place for text in texts for place in SourceLocation.in_text(text)}
    traced = {
        SourceLocation(match["file"], int(match["line"]))
        for text in texts
        for match in _TRACED.finditer(text)
    }
    for places, names in ((scripted, _EITHER), (traced, _TRACING)):
        for file in sorted({place.file for place in places}):
            lines = {place.line for place in places if place.file == file}
            origin = origin_of(file)
            if origin == "torch" and names is _TRACING:
                asked = _in_branches(file, names.pattern)
            elif is_model_code(file) and (origin != "library" or names is _EITHER):
                asked = _in_functions(file, names.pattern)
            else:
                continue
            for line, (first, last) in asked:
                if any(first <= met <= last for met in lines):
                    found[SourceLocation(file, line)] = None
    return tuple(found)


def _nodes(block: Any) -> Iterator[Any]:
    for node in block.nodes():
        yield node
        for inner in node.blocks():
            yield from _nodes(inner)


Asked = tuple[tuple[int, tuple[int, int]], ...]
"""The line of each question, and the lines that it may decide."""


@functools.lru_cache(maxsize=256)
def _in_functions(file: str, names: str) -> Asked:
    """Each question with the lines of the functions around it."""
    return tuple(
        (line, (function.lineno, function.end_lineno or function.lineno))
        for function in ast.walk(tree_of(file))
        if isinstance(function, _FUNCTIONS)
        for line in _asked(function, names)
    )


@functools.lru_cache(maxsize=256)
def _in_branches(file: str, names: str) -> Asked:
    """Each question of an `if` with the lines of the branch that is taken if it is so."""
    return tuple(
        (line, (branch.body[0].lineno, branch.body[-1].end_lineno or branch.lineno))
        for branch in ast.walk(tree_of(file))
        if isinstance(branch, ast.If)
        for line in _asked(branch.test, names)
    )


def _asked(tree: ast.AST, names: str) -> list[int]:
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Name | ast.Attribute)
        and re.fullmatch(names, node.id if isinstance(node, ast.Name) else node.attr)
    ]
