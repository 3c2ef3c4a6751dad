"""Preserve the caches of the model's code during a trace: the tensors of a trace are fake, and a
cache would return them to every later call, even in the caller's own model.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import _lru_cache_wrapper, partial
from types import CellType, FunctionType, ModuleType
from typing import Any

from torch import Tensor, nn

from enginecast.capture.python.locations import is_model_code, is_user_code


@contextmanager
def preserving_caches(module: nn.Module) -> Iterator[None]:
    """Within the block, the model's code may fill its caches. Afterwards, data in globals and class
    attributes is restored, and every `functools.lru_cache` is cleared.
    """
    spaces = list(_spaces(module))
    before = [dict(space) for space, _ in spaces]
    held = {id(value): value for names in before for value in names.values()}.values()
    kept = [(found, found.copy()) for found in held if type(found) in (dict, list, set)]
    try:
        yield
    finally:
        for found, copy in kept:
            if len(found) != len(copy) or list(map(id, found)) != list(map(id, copy)):
                found.clear()
            if isinstance(found, list):
                found[:] = copy
            else:
                found.update(copy)
        for (space, bind), names in zip(spaces, before, strict=True):
            changed = {name for name, value in names.items() if space.get(name) is not value}
            for name in changed:
                if names[name] is None or isinstance(names[name], (Tensor, int, float)):
                    bind(name, names[name])
        for value in held:
            for cache in _caches(value):
                cache.cache_clear()


def _caches(value: object) -> Iterator["_lru_cache_wrapper[Any]"]:
    """The `lru_cache` objects in a function or method and its decorators."""
    waiting, seen = [value], set[int]()
    while waiting:
        found = waiting.pop()
        if id(found) in seen:
            continue
        seen.add(id(found))
        if isinstance(found, _lru_cache_wrapper):
            yield found
        elif isinstance(found, staticmethod | classmethod):
            waiting.append(found.__func__)
        elif isinstance(found, FunctionType) and is_model_code(found.__code__.co_filename):
            cells = found.__closure__ or ()
            waiting += [getattr(found, "__wrapped__", None), *map(_content, cells)]


def _content(cell: CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # nothing was put there yet
        return None


def _spaces(module: nn.Module) -> Iterator[tuple[Mapping[str, Any], Callable[[str, Any], None]]]:
    """The namespaces of the model's modules and classes, each with a function that binds a name."""
    classes = {type(part) for part in module.modules()}
    files = {kind.__module__ for kind in classes}
    spaces = [vars(owner) for owner in (*classes, *module.modules())]
    files |= {
        held.__module__
        for space in spaces
        for held in space.values()
        if isinstance(held, FunctionType) and is_user_code(held.__code__.co_filename)
    }
    files |= {name for file in list(files) for name in _referred(file)}
    for name in files:
        found = sys.modules.get(name)
        if found is None or name in sys.builtin_module_names:
            continue  # `sys` holds every module that is imported meanwhile
        if not is_model_code(getattr(found, "__file__", None) or ""):
            continue
        yield vars(found), partial(setattr, found)
        own = (kind for kind in vars(found).values() if isinstance(kind, type))
        for kind in {kind for kind in own if kind.__module__ == name}:
            yield vars(kind), partial(setattr, kind)


def _referred(name: str) -> set[str]:
    """The modules that the names in a module come from."""
    held = vars(sys.modules[name]).values() if name in sys.modules else ()
    found = {
        value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
        for value in held
    }
    return {one for one in found if isinstance(one, str)}
