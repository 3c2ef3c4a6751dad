"""Rewrite data-dependent Python control flow into torch's structured kind, while a module runs.

Every `if`, `while`, `for`, ternary, `and`, `or`, `not` and `assert` of a function that may depend
on data becomes a call of `capture.control_flow.operators.dispatch`, which decides when it runs what
it is: plain Python where the predicate is a plain value, else `torch.cond`, `while_loop`, `scan`,
`torch.where` or an assertion in the program.  What cannot be rewritten stays as it is,
with the reason.
"""

import ast
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import nn

from enginecast.capture.control_flow.converters.jumps import TooLarge
from enginecast.capture.control_flow.converters.liveness import bound
from enginecast.capture.control_flow.converters.statements import Statements
from enginecast.capture.control_flow.operators.sites import Site, running
from enginecast.capture.python.locations import SourceLocation, holds, is_user_code, real_path
from enginecast.capture.python.recompile import (
    OWN,
    FunctionSource,
    SourceUnavailable,
    source_of,
    swapped,
)

MOST_FUNCTIONS = 20_000


@dataclass
class Restructured:
    """A module whose functions can run rewritten."""

    module: nn.Module
    functions: dict[FunctionType, ast.FunctionDef] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    """Functions that could not be read, each with the reason."""
    answered: frozenset[SourceLocation] = frozenset()
    _sites: list[Site] = field(default_factory=list)

    @property
    def sites(self) -> tuple[Site, ...]:
        """Each place; what it became is known after it ran."""
        return tuple(site for site in self._sites if site.was != "write")

    @contextmanager
    def active(self) -> Iterator[None]:
        """Run the rewritten functions, wherever they are called from."""
        with swapped(self.functions), running(self._sites, self.module):
            yield

    def add(self, source: FunctionSource) -> None:
        """Rewrite one more function."""
        definition, name = source.definition, source.function.__qualname__
        taken = [each for each in bound([definition]) if each.startswith(OWN)]
        if taken:
            self.notes.append(f"{source.file}:{definition.lineno} uses the name {taken[0]}")
            return
        before = len(self._sites)
        known: dict[tuple[int, int, str], int] = {}

        def place(node: ast.AST, was: str) -> int:
            line, column = getattr(node, "lineno", 0), getattr(node, "col_offset", 0)
            key = (line, column, was)
            if key not in known:  # statements after an early return stand in both paths
                known[key] = len(self._sites)
                self._sites.append(Site(source.file, line, name, was, column))
            return known[key]

        def note(node: ast.AST, was: str, reason: str) -> None:
            if was != "effect":
                self._sites[place(node, was)].reason = reason
                return
            kind = "if" if isinstance(node, ast.If) else type(node).__name__.lower()
            site = self._sites[place(node, kind)]
            if reason not in site.effects:
                site.effects += (reason,)

        file = real_path(source.file)
        answered = frozenset(line for where, line in self.answered if where == file)
        try:
            body = Statements(definition, place, note, answered).body()
        except TooLarge as error:
            self.notes.append(f"{source.file}:{definition.lineno} {error.message}")
            del self._sites[before:]
            return
        definition.body = body
        self.functions[source.function] = definition


def restructure(
    module: nn.Module,
    places: Collection[SourceLocation] = (),
    answered: Collection[SourceLocation] = (),
) -> Restructured:
    """Rewrite the functions of `module` that hold one of `places`; nothing is run.

    Args:
        module: on any device, meta too; it is not changed.
        places: (file, line) of statements that decide by data. Without any, all functions that the
            forward methods reach are rewritten, but for those of installed packages.
        answered: (file, line) of reads that Python gets an answer to (see `oracle`): there the
            expressions stay as they are.
    """
    result = Restructured(module, answered=frozenset(answered))
    found = functions_at(module, places) if places else user_functions(module)
    for function in found:
        try:
            result.add(source_of(function))
        except SourceUnavailable as error:
            result.notes.append(error.message)
    return result


def functions_at(module: nn.Module, places: Collection[SourceLocation]) -> tuple[FunctionType, ...]:
    """The functions that hold `places`; where they are inside each other, the innermost."""
    files = {real_path(file) for file, _ in places}
    lines = [place.resolved for place in places]

    def holders(found: Collection[FunctionType], file: str, line: int) -> list[FunctionType]:
        return [f for f in found if _file(f) == file and holds(f.__code__, line)]

    found = [f for f in reachable(module, files) if _file(f) in files]
    if any(not holders(found, file, line) for file, line in lines):  # others of a package call it
        modules = [(name, getattr(m, "__file__", None)) for name, m in list(sys.modules.items())]
        named = {name.split(".")[0] for name, file in modules if file and real_path(file) in files}
        found = [f for f in reachable(module, files, named) if _file(f) in files]
    chosen: dict[FunctionType, None] = {}
    for file, line in lines:
        if there := holders(found, file, line):
            first = max(each.__code__.co_firstlineno for each in there)
            chosen |= dict.fromkeys(f for f in there if f.__code__.co_firstlineno == first)
    return tuple(chosen)


def user_functions(module: nn.Module) -> tuple[FunctionType, ...]:
    """The functions that the forward methods reach and that no installed package defines."""
    return tuple(f for f in reachable(module, set()) if _is_users(f))


def _is_users(function: FunctionType) -> bool:
    """Whether the user wrote it; what a library generates, as dataclasses do, is the library's."""
    file = _file(function)
    if file.startswith("<"):
        module = sys.modules.get(function.__module__)
        file = getattr(module, "__file__", None) or file
    return is_user_code(file)


def _file(function: FunctionType) -> str:
    return real_path(function.__code__.co_filename)


def reachable(
    module: nn.Module, files: Collection[str], packages: Collection[str] = ()
) -> tuple[FunctionType, ...]:
    """Functions that the forward methods may call, by the names in their code.

    Inside installed packages only functions of `files`, without links, and of `packages` are
    followed.
    """
    waiting: list[Any] = []
    for owner in module.modules():
        plain = getattr(type(owner), "forward", None)  # the class of a script has none
        waiting += [owner.forward, plain, *vars(owner).values()]
    classes = tuple({type(owner) for owner in module.modules()})
    seen: set[FunctionType] = set()
    found: list[FunctionType] = []
    while waiting and len(seen) < MOST_FUNCTIONS:
        value = waiting.pop(0)
        if isinstance(value, property):
            value = value.fget
        elif isinstance(value, MethodType | staticmethod | classmethod):
            value = value.__func__
        if not isinstance(value, FunctionType) or value in seen:
            continue
        function = value
        seen.add(function)
        is_followed = (function.__module__ or "").split(".")[0] in packages
        is_followed = is_followed or _file(function) in files or function.__name__ == "forward"
        if is_followed or _is_users(function):
            found.append(function)
            waiting += _called(function, classes)
        waiting.append(getattr(function, "__wrapped__", None))  # decorators keep functions there
        for cell in function.__closure__ or ():
            with suppress(ValueError):  # not bound yet
                waiting.append(cell.cell_contents)
    return tuple(found)


def _called(function: FunctionType, classes: tuple[type, ...]) -> list[Any]:
    """What the names in its code may mean: globals, attributes of modules, methods."""
    names = _names(function.__code__)
    called: list[Any] = []
    for name in names:
        value = function.__globals__.get(name)
        if isinstance(value, ModuleType):
            called += [vars(value).get(other) for other in names]
        elif isinstance(value, type):
            called += [vars(value).get(other) for other in (*names, "__init__", "__call__")]
        else:
            called.append(value)
        called += [vars(base).get(name) for owner in classes for base in owner.__mro__]
    return [value for value in called if value is not None]


def _names(code: CodeType) -> set[str]:
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= _names(constant)
    return names
