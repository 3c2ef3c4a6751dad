"""Clamps in a model's code that only run in fp16, which a capture in another dtype does not have.

    if hidden_states.dtype == torch.float16:
        ...
        hidden_states = torch.clamp(hidden_states, min=-clamp_value, max=clamp_value)

Found by reading the `forward` of each class that made the program, where Python has it.  Which of
the lines run for a given model is not decided; a clamp that is written in another way is not found.
"""

import ast
import inspect
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from torch.export import ExportedProgram


@dataclass(frozen=True)
class SourceClamp:
    """The clamps for fp16 alone in the code of a class."""

    owner: str
    """Name of the class."""
    sources: tuple[str, ...]
    """file:line of each condition."""
    modules: int
    """How many modules of that class the program has."""


def source_clamps(program: ExportedProgram) -> tuple[SourceClamp, ...]:
    """What the classes of a program's modules do in fp16 alone."""
    return tuple(
        SourceClamp(name.rpartition(".")[2], places, len(paths))
        for name, paths in _classes(program).items()
        if (places := tuple(_clamps_of(name)))
    )


def _classes(program: ExportedProgram) -> dict[str, set[str]]:
    """Full class name -> paths of its modules in the program."""
    found: dict[str, set[str]] = {}
    for node in program.graph.nodes:
        for path, kind in (node.meta.get("nn_module_stack") or {}).values():
            name = kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__qualname__}"
            found.setdefault(name, set()).add(str(path))
    return found


def _clamps_of(class_name: str) -> Iterator[str]:
    """file:line of each condition on fp16 under which the class clamps."""
    module, _, name = class_name.rpartition(".")
    forward = getattr(getattr(sys.modules.get(module), name, None), "forward", None)
    try:
        lines, first = inspect.getsourcelines(inspect.unwrap(forward))  # type: ignore[arg-type]
        file = PurePath(inspect.getsourcefile(inspect.unwrap(forward)) or "").name  # type: ignore[arg-type]
        tree = ast.parse(textwrap.dedent("".join(lines)))
    except (TypeError, OSError, SyntaxError):  # no Python source behind it
        return
    branches = [node for node in ast.walk(tree) if isinstance(node, ast.If)]
    for node in sorted(branches, key=lambda branch: branch.lineno):
        if _asks_for_fp16(node.test) and _calls_clamp(node):
            yield f"{file}:{first + node.lineno - 1}"


def _asks_for_fp16(test: ast.expr) -> bool:
    return any(_named(node, "float16") for node in ast.walk(test))


def _calls_clamp(branch: ast.If) -> bool:
    calls = (n for each in branch.body for n in ast.walk(each) if isinstance(n, ast.Call))
    return any(_named(call.func, "clamp") or _named(call.func, "clamp_") for call in calls)


def _named(node: Any, name: str) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == name
