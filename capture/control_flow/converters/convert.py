"""Rewrite data-dependent Python control flow into torch's structured kind, while a module runs.

Every `if`, `while`, `for`, ternary, `and`, `or`, `not` and `assert` of a function that may depend
on data becomes a call of `capture.control_flow.operators.dispatch`, which decides when it runs what
it is: plain Python where the predicate is a plain value, else `torch.cond`, `while_loop`, `scan`,
`torch.where` or an assertion in the program.  What cannot be rewritten stays as it is,
with the reason.
"""

import ast
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FunctionType

from torch import nn

from enginecast.capture.control_flow.converters.functions import functions_at, user_functions
from enginecast.capture.control_flow.converters.jumps import PREFIX, TooLarge
from enginecast.capture.control_flow.converters.liveness import bound
from enginecast.capture.control_flow.converters.statements import Statements
from enginecast.capture.control_flow.operators.sites import Site, running
from enginecast.capture.python.locations import SourceLocation, real_path
from enginecast.capture.python.recompile import (
    FunctionSource,
    SourceUnavailable,
    source_of,
    swapped,
)

IDLE = ("write", "boolean")


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
        return tuple(site for site in self._sites if site.was not in IDLE)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Run the rewritten functions, wherever they are called from."""
        with swapped(self.functions), running(self._sites, self.module):
            yield

    def add(self, source: FunctionSource) -> None:
        """Rewrite one more function."""
        definition = source.definition
        taken = [name for name in bound([definition]) if name.startswith(PREFIX)]
        if taken:
            self.notes.append(f"{source.file}:{definition.lineno} uses the name {taken[0]}")
            return
        places = _Places(self._sites, source)
        before = len(self._sites)
        try:
            body = Statements(definition, places.place, places.note, self._answered(source)).body()
        except TooLarge as error:
            self.notes.append(f"{source.file}:{definition.lineno} {error.message}")
            del self._sites[before:]
            return
        definition.body = body
        self.functions[source.function] = definition

    def _answered(self, source: FunctionSource) -> frozenset[int]:
        file = real_path(source.file)
        return frozenset(line for known, line in self.answered if known == file)


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


class _Places:
    """Gives the places of one function their indexes."""

    def __init__(self, sites: list[Site], source: FunctionSource) -> None:
        self._sites = sites
        self._source = source
        self._known: dict[tuple[int, int, str], int] = {}

    def place(self, node: ast.AST, was: str) -> int:
        line, column = getattr(node, "lineno", 0), getattr(node, "col_offset", 0)
        key = (line, column, was)
        if key not in self._known:  # statements after an early return stand in both ways
            self._known[key] = len(self._sites)
            name = self._source.function.__qualname__
            self._sites.append(Site(self._source.file, line, name, was))
        return self._known[key]

    def note(self, node: ast.AST, was: str, reason: str) -> None:
        """A reason to leave a place alone, or an effect that it must not have on one way only."""
        if was == "effect":
            kind = "if" if isinstance(node, ast.If) else type(node).__name__.lower()
            site = self._sites[self.place(node, kind)]
            if reason not in site.effects:
                site.effects += (reason,)
        else:
            self._sites[self.place(node, was)].reason = reason
