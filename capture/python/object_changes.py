"""What Python objects hold, in marks that differ once it is replaced or written into."""

import array
import functools
import gc
import inspect
import itertools
import operator
import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from itertools import islice
from types import FunctionType, GeneratorType, MethodType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from enginecast.capture.python.locations import is_model_code

MOST_ITEMS = 1000
"""Items of a container that are looked at, and values that one attribute holds."""
DEPTH = 5
"""Containers and objects within one another that are looked into."""
PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
LISTS = (list, tuple, set, frozenset, dict, deque, bytearray, array.array)
_CACHED = type(functools.cache(int))
_OBJECTS = (SimpleNamespace, FunctionType, threading.local)
_OTHERS = (np.ndarray, itertools.count, _CACHED, partial, MethodType, GeneratorType)
_HELD = (Tensor, *LISTS, *_OBJECTS, *_OTHERS, *PLAIN)
"""What is looked at outside of modules; and objects of classes of the model's own code."""


def is_models(kind: type) -> bool:
    """Whether a class is defined in the model's own code."""
    try:
        return is_model_code(inspect.getfile(kind))
    except (OSError, TypeError):
        return False


def is_held(name: str, value: Any) -> bool:
    if name.startswith("__"):
        return False
    if isinstance(value, _HELD) or _is_iterator(value):
        return True
    return is_models(value if isinstance(value, type) else type(value))


@dataclass(frozen=True, eq=False)
class _Seen:
    """A tensor as it was: it equals itself while nothing was written, and an equal one."""

    tensor: Tensor
    version: int

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Seen) or self.tensor is other.tensor:
            return isinstance(other, _Seen) and self.version == other.version
        one, two = self.tensor, other.tensor
        if isinstance(one, FakeTensor) or isinstance(two, FakeTensor):
            return False
        same_kind = (one.shape, one.dtype, one.device) == (two.shape, two.dtype, two.device)
        return same_kind and torch.equal(one, two)


def mark(value: Any) -> Any:
    """What shows that a value was replaced or written into; the value itself, of plain ones."""
    return _Marker().mark(value, DEPTH)


class _Marker:
    left = MOST_ITEMS
    """Values that are looked at, for there may be circles."""

    def mark(self, value: Any, depth: int) -> Any:
        self.left -= 1
        if isinstance(value, Tensor):
            return _Seen(value, value._version)
        if isinstance(value, PLAIN):
            return value
        if isinstance(value, (np.ndarray, itertools.count)):
            small = isinstance(value, itertools.count) or value.size <= MOST_ITEMS
            return type(value), 0, [id(value), repr(value) if small else None]
        if not depth or self.left <= 0 or isinstance(value, nn.Module):
            return id(value)  # a module is looked at for itself
        if isinstance(value, _CACHED):
            results = _results(value).items()
            return _Cached({key: self.mark(each, depth - 1) for key, each in results})
        if isinstance(value, LISTS):
            values = value.values() if isinstance(value, dict) else value
            items = [self.mark(item, depth - 1) for item in islice(values, MOST_ITEMS)]
            keys = [*islice(value, MOST_ITEMS)] if isinstance(value, dict) else []
            return type(value), len(value), [*keys, *items]
        found = _inside(value)
        if found is None:
            return id(value)
        items = [self.mark(each, depth - 1) for each in islice(found.values(), MOST_ITEMS)]
        return type(value), 0, [id(value), *found, *items]


def _inside(value: Any) -> dict[str, Any] | None:
    """What an object holds, by name; None of one that nothing is known of."""
    if isinstance(value, partial):
        return {"args": value.args, "keywords": value.keywords}
    if isinstance(value, MethodType):
        return {"self": value.__self__}
    if isinstance(value, GeneratorType):
        frame = value.gi_frame
        return {} if frame is None else {"at": frame.f_lasti, **frame.f_locals}
    if _is_iterator(value):
        return {"left": operator.length_hint(value)}
    if isinstance(value, type):
        held = ((k, v) for k, v in vars(value).items() if not isinstance(v, FunctionType))
        return {k: v for k, v in held if is_held(k, v)} if is_models(value) else None
    if not isinstance(value, _OBJECTS) and not is_models(type(value)):
        return None
    slots = [vars(kind).get("__slots__", ()) for kind in type(value).__mro__]
    names = [name for each in slots for name in ([each] if isinstance(each, str) else each)]
    held = ((name, getattr(value, name, None)) for name in names if name != "__dict__")
    return {**dict(held), **getattr(value, "__dict__", {})}


def _is_iterator(value: Any) -> bool:
    """Whether a value is one of Python's own iterators that know how much is left."""
    return hasattr(value, "__next__") and hasattr(value, "__length_hint__")


@dataclass(frozen=True, eq=False)
class _Cached:
    """The results that `functools.cache` keeps.  Two marks are equal while the results that both
    have are; a result that was added does not count as a change.
    """

    results: Mapping[int, Any]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Cached):
            return False
        return all(self.results[k] == other.results[k] for k in self.results.keys() & other.results)


def _results(cache: Any) -> dict[int, Any]:
    """What a cached function keeps that can be written into, by identity."""
    found = [each for each in gc.get_referents(cache) if each is not vars(cache)]
    tables = [each for each in found if isinstance(each, dict)][-1:]  # behind the results
    found += [result for table in tables for result in table.values()]
    kept = (each for each in found if not any(each is table for table in tables))
    return {id(each): each for each in kept if isinstance(each, (Tensor, *LISTS))}
