"""Watch the Python state that lives between calls: attributes of modules and of their classes,
globals, and closure variables.
"""

import dis
import gc
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import (
    CodeType,
    FrameType,
    FunctionType,
)
from typing import Any

import torch
from torch import Tensor, nn

from enginecast.capture.python.locations import is_library_code, is_model_code, noting_calls
from enginecast.capture.python.object_changes import LISTS, PLAIN, is_held, is_models, mark

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
