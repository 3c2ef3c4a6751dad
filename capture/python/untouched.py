"""The state that a model keeps outside of itself, as it was before a trace.

What a trace computes is fake.  Kept by `lru_cache`, a class or a global, it would come back in the
caller's own model.
"""

import functools
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from enginecast.capture.python.locations import is_library_code, is_model_code

DEPTH = 3
"""How deep in containers a tensor is looked for."""


@contextmanager
def untouched(module: nn.Module) -> Iterator[None]:
    """Undo what the block leaves of fake tensors in caches, classes and globals of model code."""
    owners: list[Any] = [kind for part in module.modules() for kind in type(part).__mro__]
    owners += [found for found in list(sys.modules.values()) if _is_users(found)]
    before = [(owner, dict(vars(owner))) for owner in dict.fromkeys(owners)]
    contents = {
        id(value): (value, value.copy())
        for _, names in before
        for value in names.values()
        if type(value) in (dict, list, set)
    }
    calls = {id(cache): cache.cache_info().misses for cache in _caches()}
    try:
        yield
    finally:
        for owner, names in before:
            _restore(owner, names)
        for value, copied in contents.values():
            if value is not sys.modules and _is_fake(value):
                value.clear()
                (value.extend if isinstance(value, list) else value.update)(copied)
        for cache in _caches():  # what they hold cannot be looked at
            if cache.cache_info().misses != calls.get(id(cache), 0):
                cache.cache_clear()


def _is_users(module: object) -> bool:
    file = getattr(module, "__file__", None) if type(module) is ModuleType else None
    return isinstance(file, str) and is_model_code(file) and not is_library_code(file)


def _restore(owner: Any, names: dict[str, Any]) -> None:
    for name, value in list(vars(owner).items()):
        if value is names.get(name) or not _is_fake(value):
            continue
        if name in names:
            setattr(owner, name, names[name])
        else:
            delattr(owner, name)


def _is_fake(value: Any, depth: int = DEPTH) -> bool:
    if isinstance(value, FakeTensor):
        return True
    if not depth or type(value) not in (dict, list, set, tuple):
        return False
    items = value.values() if isinstance(value, dict) else value
    return any(_is_fake(item, depth - 1) for item in list(items))


def _caches() -> Iterator[Any]:
    """Every `lru_cache` and `cache` of model code."""
    for found in gc.get_objects():
        if type(found) is functools._lru_cache_wrapper:
            code = getattr(found.__wrapped__, "__code__", None)
            if code is not None and is_model_code(code.co_filename):
                yield found
