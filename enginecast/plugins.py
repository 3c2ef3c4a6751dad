"""Things that are known by name: ours in a table, those of other packages by entry point.

Classes are loaded on use, so that listing the names imports nothing.
"""

import difflib
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import TypeVar

from enginecast.errors import EnginecastError

T = TypeVar("T")


@dataclass(frozen=True)
class Registry:
    """The classes of one kind, by name."""

    kind: str
    """In messages: "pass"."""
    group: str
    """Entry-point group by which other packages add classes."""
    own: Mapping[str, str]
    """Name -> "module:Class"."""
    error: type[EnginecastError]
    """What is raised for a name or class that is not usable."""

    def known(self) -> dict[str, str]:
        """Name -> "module:Class" of every class, ours first; imports none of them."""
        known = dict(self.own)
        for entry in _installed(entry_points, self.group, tuple(sys.path)):
            if entry.name in known:
                package = entry.dist.name if entry.dist else "a package without a name"
                raise self.error(
                    f"two {_plural(self.kind)} are called '{entry.name}': {known[entry.name]} and"
                    f" {entry.value}",
                    hint=f"The second comes from {package}; uninstall it or have it rename its"
                    f" {self.kind}.",
                )
            known[entry.name] = entry.value
        return known

    def load(self, name: str, base: type[T]) -> type[T]:
        """The class of this name.

        Args:
            base: what it must be derived from.

        Raises:
            EnginecastError: there is no such name, or its class cannot be loaded or used.
        """
        known = self.known()
        if name not in known:
            close = difflib.get_close_matches(name, known)
            meant = f"Did you mean {' or '.join(map(repr, close))}?  " if close else ""
            raise self.error(
                f"unknown {self.kind} '{name}'", hint=f"{meant}Known: {', '.join(known)}."
            )
        where = known[name]
        module, _, attribute = where.partition(":")
        try:
            found = getattr(import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            raise self.error(
                f"{self.kind} '{name}' cannot be loaded from {where}: {error}"
            ) from error
        if not (isinstance(found, type) and issubclass(found, base)):
            raise self.error(
                f"{self.kind} '{name}': {where} is not a subclass of"
                f" {base.__module__}.{base.__name__}"
            )
        own_name = getattr(found, "name", None)  # base classes and unfinished ones have none
        if own_name != name:
            raise self.error(f"{self.kind} '{name}': {where} calls itself {own_name!r}")
        return found


@cache
def _installed(
    find: Callable[..., Iterable[EntryPoint]], group: str, path: tuple[str, ...]
) -> tuple[EntryPoint, ...]:
    """The entry points of a group: finding them reads a file of every package on the path."""
    return tuple(sorted(find(group=group), key=lambda one: (one.name, one.value)))


def _plural(kind: str) -> str:
    return f"{kind}es" if kind.endswith("s") else f"{kind}s"
