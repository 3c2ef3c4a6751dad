"""Watch the Python state that lives between calls: attributes of modules and of their classes,
globals, and closure variables.
"""

import array
import dis
import functools
import gc
import inspect
import itertools
import operator
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from types import (
    CodeType,
    FrameType,
    FunctionType,
    GeneratorType,
    MethodType,
    SimpleNamespace,
)
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from enginecast.capture.python.locations import is_library_code, is_model_code, noting_calls

_OWN = frozenset(vars(nn.Module()))
"""Attributes that every module has: its hooks and registries."""
_STORES = ("STORE_GLOBAL", "STORE_DEREF", "STORE_ATTR")
_LOADS = ("LOAD_GLOBAL", "LOAD_DEREF", "LOAD_ATTR", "LOAD_METHOD")


@dataclass(frozen=True)
class Change:
    """An attribute that a call left different."""

    name: str
    """Dotted, from the model: `encoder.calls`."""
    how: str
    """Such as `was 0, is 1`."""
    place: str
    """`file:line` of the code that writes it; empty when that was not found."""

    def __str__(self) -> str:
        where = f" at {self.place}" if self.place else ""
        return f"{self.name}{where} ({self.how})"


@dataclass(frozen=True)
class _Holder:
    """Something with names that calls may bind anew."""

    prefix: str
    names: Callable[[], Mapping[str, Any]]
    """What it holds by now."""
    write: Callable[[str, Any], None]
    place: Callable[[str], str]


class Watch:
    """Looks at all that a module's calls may change.

    What functions hold is known once they were called: within `following`.
    """

    def __init__(self, module: nn.Module) -> None:
        self._holders: list[_Holder] = []
        self._marks: list[dict[str, Any]] = []
        self._codes: dict[CodeType, None] = {}
        kinds: dict[type, None] = {}
        for name, part in module.named_modules():
            own = [kind for kind in type(part).__mro__ if is_models(kind)]
            self._add(_of_module(name, part, partial(self._line, owners=own)))
            kinds |= dict.fromkeys(own)
        for kind in kinds:
            self._add(
                _Holder(
                    kind.__name__,
                    lambda kind=kind: {k: v for k, v in vars(kind).items() if is_held(k, v)},  # type: ignore[misc]
                    partial(setattr, kind),
                    self._line,
                )
            )

    @contextmanager
    def following(self) -> Iterator[None]:
        """Take in what functions of the model's code refer to, as it is when they are called."""
        with noting_calls(self._note):
            yield

    def changes(self) -> list["Change"]:
        """What is another than it was; call `look` to start anew."""
        return [change for change, _, _, _ in self.moved()]

    def moved(self) -> list[tuple["Change", _Holder, str, Any]]:
        """Likewise, each with who holds it, by what name, and what it was, as marked."""
        found = []
        for holder, marks in zip(self._holders, self._marks, strict=True):
            for key, value in holder.names().items():
                was, now = marks.get(key), mark(value)
                if key in marks and type(was) is type(now) and was == now:
                    continue
                how = _how(was, value) if key in marks else f"was not set, {_now(value)}"
                name = f"{holder.prefix}.{key}".lstrip(".")
                found.append((Change(name, how, holder.place(key)), holder, key, was))
        return found

    def look(self) -> None:
        """Remember everything as it is now."""
        self._marks = [_marked(holder) for holder in self._holders]

    def _add(self, holder: _Holder) -> None:
        self._holders.append(holder)
        self._marks.append(_marked(holder))

    def _note(self, frame: FrameType) -> None:
        code = frame.f_code
        if code in self._codes or not is_model_code(code.co_filename):
            return
        self._codes[code] = None
        names, space = code.co_names, frame.f_globals
        if any(name in space and is_held(name, space[name]) for name in names):

            def held() -> dict[str, Any]:
                return {n: space[n] for n in names if n in space and is_held(n, space[n])}

            self._add(_Holder("", held, space.__setitem__, self._line))
        closed = set(code.co_freevars) - {"__class__"}
        if closed and not is_library_code(code.co_filename):  # whose decorators hold functions
            self._add(_of_closure(code, self._line))
        if function := _function(frame):
            self._add(_of_defaults(function))

    def _line(self, key: str, owners: Sequence[type] = ()) -> str:
        """The line that binds a name, else the first that reads it.

        Args:
            owners: classes whose methods are looked at first.
        """
        prefixes = tuple(f"{owner.__qualname__}." for owner in owners)
        own = [code for code in self._codes if code.co_qualname.startswith(prefixes)]
        for kinds, codes in itertools.product((_STORES, _LOADS), (own, self._codes)):
            for code in codes:
                for step in dis.get_instructions(code):
                    if step.opname in kinds and step.argval == key and step.positions:
                        return f"{code.co_filename}:{step.positions.lineno}"
        return ""


def _marked(holder: _Holder) -> dict[str, Any]:
    return {key: mark(value) for key, value in holder.names().items()}


def _set_by_script(module: nn.Module) -> tuple[str, ...]:
    """Attributes of a TorchScript module that its methods set or may change in place, but for its
    buffers.  Python does not list them.
    """
    if not isinstance(module, torch.jit.ScriptModule):
        return ()
    methods = (module._c._get_method(name) for name in module._c._method_names())
    nodes = (
        node
        for method in methods
        for kind in ("prim::GetAttr", "prim::SetAttr")
        for node in method.graph.findAllNodes(kind, True)
    )
    held = {node.s("name"): None for node in nodes}
    own = {*module._buffers.keys(), *module._parameters.keys(), *module._modules.keys()}
    return tuple(name for name in held if name not in own and module._c.hasattr(name))


def _of_module(name: str, module: nn.Module, place: Callable[[str], str]) -> _Holder:
    scripted = _set_by_script(module)

    def names() -> dict[str, Any]:
        own = {key: value for key, value in vars(module).items() if key not in _OWN}
        own |= {key: module._c.getattr(key) for key in scripted}  # type: ignore[operator,union-attr]
        return {**own, "training": module.training, **module._buffers, **module._parameters}

    return _Holder(name, names, partial(setattr, module), place)


def _of_closure(code: CodeType, place: Callable[[str], str]) -> _Holder:
    """The variables of outer functions that the functions with this code read."""
    made = [f for f in gc.get_referrers(code) if isinstance(f, FunctionType)]
    cells = {
        name: cell
        for function in made[:1]
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True)
    }

    def held() -> dict[str, Any]:
        found = {}
        for name, cell in cells.items():
            try:
                value = cell.cell_contents
            except ValueError:  # not bound yet
                continue
            if is_held(name, value):
                found[name] = value
        return found

    return _Holder("", held, lambda key, value: setattr(cells[key], "cell_contents", value), place)


def _function(frame: FrameType) -> FunctionType | None:
    """The function that a frame runs, as far as its name leads there."""
    code = frame.f_code
    first = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
    for found in (frame.f_globals.get(code.co_name), getattr(type(first), code.co_name, None)):
        if isinstance(found, FunctionType) and found.__code__ is code:
            return found
    return None


def _of_defaults(function: FunctionType) -> _Holder:
    """Default values that calls may change: a list, say, which is made once for all calls."""
    code, defaults = function.__code__, function.__defaults__ or ()
    names = code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]
    given = {**dict(zip(names, defaults, strict=True)), **(function.__kwdefaults__ or {})}
    held = {n: v for n, v in given.items() if is_held(n, v) and not isinstance(v, PLAIN)}
    line = f"{code.co_filename}:{code.co_firstlineno}"
    return _Holder(function.__name__, lambda: held, held.__setitem__, lambda key: line)


def _how(mark: Any, value: Any) -> str:
    if isinstance(value, Tensor):
        return "a tensor"
    if isinstance(value, LISTS) and isinstance(mark, tuple) and len(mark) == 3:
        return f"had {mark[1]} items, has {len(value)}"
    if isinstance(value, PLAIN) and isinstance(mark, PLAIN):
        return f"was {mark!r}, {_now(value)}"
    return f"a {type(value).__name__}"


def _now(value: Any) -> str:
    return f"is {value!r}" if isinstance(value, PLAIN) else f"is a {type(value).__name__}"


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
