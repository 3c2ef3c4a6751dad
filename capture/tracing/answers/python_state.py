"""What Python objects hold that a call is given, so that a change of them is noticed.

A call that is traced once for each answer runs several times.  What it leaves in an object is not
one of its results: code after the call would find there what the last path has left.
"""

import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any

from torch import Tensor, nn
from torch.types import py_sym_types

from enginecast.capture.python.locations import is_user_code

_SIMPLE = (str, bytes, bool, int, float, complex, type(None))
_CLOSED = (*_SIMPLE, *py_sym_types, Tensor, nn.Module, ModuleType, FunctionType, type)
"""Types of values that are not looked into: `probe` sees writes into tensors and modules."""
_OTHERS = frozenset({"torch", "numpy", "enginecast"}) | sys.stdlib_module_names
"""Packages whose objects hold what no model computes with, such as loggers."""
_CONTAINERS = (Mapping, list, tuple, set, frozenset, deque)


class PythonState:
    """The objects that are reached from `roots`, and what they hold now."""

    def __init__(self, *roots: object) -> None:
        self._held: dict[int, tuple[object, list[tuple[object, object]]]] = {}
        """By id: an object, which is kept so that no id is given twice, and its contents."""
        waiting: list[object] = [roots]
        while waiting:
            owner = waiting.pop()
            if id(owner) in self._held or not _is_open(owner):
                continue
            contents = _contents(owner)
            self._held[id(owner)] = owner, contents
            waiting.extend(value for _, value in contents)

    def changed(self) -> str:
        """The type of an object that holds something else than it did; "" if there is none."""
        for owner, before in self._held.values():
            now = _contents(owner)
            if len(now) != len(before) or not all(map(_are_one, now, before)):
                return type(owner).__name__
        return ""


def reached_from(module: nn.Module) -> Iterator[object]:
    """What the code of a module and of those in it may write to without being given it."""
    files: set[int] = set()
    for part in module.modules():
        yield from vars(part).values()
        for kind in type(part).__mro__:
            forward = vars(kind).get("forward")
            if not isinstance(forward, FunctionType):
                continue
            if not is_user_code(forward.__code__.co_filename):
                continue
            yield from vars(kind).values()
            if id(forward.__globals__) not in files:
                files.add(id(forward.__globals__))
                yield _Variables(forward.__globals__)


@dataclass
class _Variables:
    """The global variables of a file."""

    values: dict[str, Any]


def _is_open(value: object) -> bool:
    if isinstance(value, _CLOSED):
        return False
    if isinstance(value, _CONTAINERS) or type(value) is _Variables:
        return True
    package = type(value).__module__.partition(".")[0]
    return package not in _OTHERS or type(value).__name__ == "SimpleNamespace"


def _contents(owner: Any) -> list[tuple[object, object]]:
    """What an object holds, by name or place."""
    if type(owner) is _Variables:
        return [(name, value) for name, value in owner.values.items() if name[:2] != "__"]
    found: list[tuple[object, object]] = []
    if isinstance(owner, Mapping):
        found += owner.items()
    elif isinstance(owner, _CONTAINERS):
        found += enumerate(owner)
    found += getattr(owner, "__dict__", {}).items()
    for kind in type(owner).__mro__:
        slots: str | Iterable[str] = vars(kind).get("__slots__", ())
        names: Sequence[str] = [slots] if isinstance(slots, str) else list(slots)
        found += [(name, getattr(owner, name)) for name in names if hasattr(owner, name)]
    return found


def _are_one(now: tuple[object, object], before: tuple[object, object]) -> bool:
    """Whether a name stands for the same object, or for an equal number or text."""
    (name, value), (old_name, old) = now, before
    if value is not old and not (isinstance(value, _SIMPLE) and type(value) is type(old)):
        return False
    return (name is old_name or name == old_name) and (value is old or value == old)
