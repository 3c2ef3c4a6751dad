"""What people see of public modules and objects: the names of `dir`, and a `repr` of one line.

A module says its public names once, in `__all__`; those that take long to import are imported when
they are first used.
"""

from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from typing import Any


def listing(names: Iterable[str]) -> Callable[[], list[str]]:
    """A module's `__dir__`: its public names, and nothing else."""
    shown = sorted(names)

    def show() -> list[str]:
        return list(shown)

    return show


def importing(module: str, where: Mapping[str, str]) -> Callable[[str], Any]:
    """A module's `__getattr__`: each name is imported from its place when it is first used.

    Args:
        module: the name of the module.
        where: `package.module:name` by public name, or a module's own name.
    """

    def get(name: str) -> Any:
        if name not in where:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        from enginecast.installation import needing  # slow to import

        place, _, attribute = where[name].partition(":")
        with needing(f"{module}.{name}"):
            found = import_module(place)
            return getattr(found, attribute) if attribute else found

    return get


def some(items: Iterable[str], most: int = 6) -> str:
    """Items in a line: the first ones of many."""
    every = list(items)
    rest = len(every) - most
    return ", ".join([*every[:most], *([f"... {rest} more"] if rest > 0 else [])])


def described(value: Any) -> str:
    """An array or a tensor in words: "float32 [2, 8]"; of anything else, its type."""
    dtype, shape = getattr(value, "dtype", None), getattr(value, "shape", None)
    if dtype is None or shape is None:
        return type(value).__name__
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}"
