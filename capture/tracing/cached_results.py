"""Results that a model's code keeps from call to call, by `functools.lru_cache`.

A function that is called while a model is traced gives a tensor without values.  Its cache would
hand that to eager, which is called with the same sizes later; caches of static methods and of
functions are shared by all modules of a class.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


@contextmanager
def forgetting_results(module: nn.Module) -> Iterator[None]:
    """Empty the caches of a model's own code afterwards."""
    try:
        yield
    finally:
        for cache in _caches(module):
            cache.cache_clear()


def _caches(module: nn.Module) -> Iterator[Any]:
    """The caches in the classes of a model's modules, and in the files that define these."""
    classes = {base for part in module.modules() for base in type(part).__mro__}
    own = {cls for cls in classes if not cls.__module__.startswith(("torch.", "builtins"))}
    for cls in own:
        for value in vars(cls).values():
            yield from _caches_of(value)
    for name in {cls.__module__ for cls in own}:
        for value in list(vars(sys.modules.get(name, object)).values()):
            if getattr(value, "__module__", None) == name:
                yield from _caches_of(value)


def _caches_of(value: Any) -> Iterator[Any]:
    """The caches in a function and in what its decorators hold of it."""
    waiting, seen = [value], set[int]()
    while waiting:
        found = waiting.pop()
        if id(found) in seen or isinstance(found, type):
            continue
        seen.add(id(found))
        if callable(getattr(found, "cache_clear", None)):
            yield found
        held = [getattr(found, name, None) for name in ("__func__", "__wrapped__", "fget")]
        for cell in getattr(found, "__closure__", None) or ():
            try:
                held.append(cell.cell_contents)
            except ValueError:  # nothing was put there yet
                continue
        waiting += [each for each in held if callable(each)]
