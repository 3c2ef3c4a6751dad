"""The scan's walk through functions and modules: each is walked once for equal arguments."""

import ast
import types
from collections.abc import Mapping
from typing import Any

from torch import nn

from enginecast.capture.findings import Finding
from enginecast.capture.taint import CLEAN, Value, as_state, constant, guess, join, key, mix
from enginecast.capture.taint_arguments import (
    arguments_of,
    bind_arguments,
    defaults_of,
    local_defaults,
)
from enginecast.capture.taint_calls import (
    called_back,
    data_of,
    is_apply,
    is_torch,
    is_user_file,
    outside_call,
    unwrapped,
)
from enginecast.capture.taint_expressions import attribute_of, evaluate
from enginecast.capture.taint_frame import Arguments, Frame, Local
from enginecast.capture.taint_lookup import Property, Super, stored, super_attribute
from enginecast.capture.taint_methods import is_own, method_call
from enginecast.capture.taint_places import OneOf
from enginecast.capture.taint_source import function_node, not_scanned
from enginecast.capture.taint_statements import execute

MOST_NODES = 1_500_000
"""Expressions and statements that one scan looks at; what is beyond is named, not scanned."""
DEEPEST = 60
"""Calls within calls; deeper ones are taken for unknown functions."""


class TooMuchError(Exception):
    """The scan has looked at `MOST_NODES`."""


class Walker:
    """Walks through functions; see `Walk`."""

    def __init__(
        self,
        paths: Mapping[int, str],
        state: frozenset[tuple[int, str]],
        *,
        is_eager: bool = False,
    ) -> None:
        self.is_eager = is_eager
        """Whether code that asks torch if it is being captured hears that it is not."""
        self._paths = paths
        self._state = state
        self.written: set[tuple[int, str]] = set()
        """Attributes of modules, by the module's id, that the walk saw written."""
        self.changed: set[tuple[int, str]] = set()
        """Those of them that are not written with a constant."""
        self._memo: dict[tuple[object, ...], tuple[Value, list[Finding]]] = {}
        self._kept: list[object] = []
        self._active: list[tuple[object, ...]] = []
        self._nodes = 0

    def evaluate(self, node: ast.expr, frame: Frame) -> Value:
        self._nodes += 1
        if self._nodes > MOST_NODES:
            raise TooMuchError
        return evaluate(node, frame)

    def execute(self, statements: list[ast.stmt], frame: Frame) -> frozenset[str]:
        return execute(statements, frame)

    def write_state(self, owner: object, name: str, *, is_constant: bool = False) -> None:
        self.written.add((id(owner), name))
        if not is_constant:
            self.changed.add((id(owner), name))

    def attribute(self, value: Value, name: str, frame: Frame) -> Value | None:
        obj = value.const
        if isinstance(obj, Super):
            found = super_attribute(obj, name)
        else:
            found = stored(obj, name)
            if (id(obj), name) in self._state and isinstance(found, Value | None):
                return as_state(found)
        if isinstance(found, Property):
            node = ast.Call(ast.Name(name, ast.Load()), [], [])
            return self._walk_function(found.getter, Arguments((value,)), frame, node)
        return found

    def call_node(self, node: ast.Call, frame: Frame) -> Value:
        if isinstance(node.func, ast.Name) and node.func.id == "super" and not node.args:
            receiver = next(iter(frame.names.values()), CLEAN)
            return constant(Super(frame.owner, receiver)) if frame.owner else CLEAN
        if not isinstance(node.func, ast.Attribute):
            return self.call(frame.evaluate(node.func), arguments_of(node, frame), frame, node)
        base = frame.evaluate(node.func.value)
        arguments = arguments_of(node, frame)
        name = node.func.attr
        is_users = isinstance(base.const, (list, set, dict)) and is_own(base.const, name)
        found = None if is_users else method_call(base, name, arguments, frame, node)
        if found is not None:
            return found
        function = attribute_of(base, name, frame)
        if not function.is_known:
            return guess((base, *arguments.all))
        return self.call(function, arguments, frame, node)

    def call(self, function: Value, arguments: Arguments, frame: Frame, node: ast.expr) -> Value:
        assert isinstance(node, ast.Call)
        if not function.is_known:
            return guess((function, *arguments.all))
        target, arguments = unwrapped(function.const, arguments)
        if isinstance(target, OneOf):
            made = [self.call(constant(each), arguments, frame, node) for each in target.choices]
            return _joined(made)
        if isinstance(target, Local):
            return self._walk_local(target, arguments, frame, node)
        if isinstance(target, nn.Module):
            return self._call_module(target, arguments, frame, node)
        if isinstance(target, types.FunctionType) and is_user_file(target.__code__.co_filename):
            return self._walk_function(target, arguments, frame, node)
        if is_apply(target, arguments):
            owner, *others = arguments.positional
            own = Arguments((CLEAN, *others), arguments.named, arguments.rest)
            return self._walk_function(owner.const.forward, own, frame, node)
        callable_object = self._call_method(target)
        if callable_object is not None:
            return self._walk_function(
                callable_object, arguments.prepend(constant(target)), frame, node
            )
        self._call_back(target, arguments, frame, node)
        return outside_call(target, arguments, frame, node)

    def scan_module(self, module: nn.Module, arguments: Arguments) -> list[Finding]:
        """What is met when `module` is called."""
        frame = Frame(self, "", "", "", {}, {})
        self._call_module(module, arguments, frame, ast.Call(ast.Name("module"), [], []))
        return frame.all_met()

    def _call_method(self, target: Any) -> Any:
        """`__call__` of an object of the user's own class."""
        if isinstance(target, type | types.FunctionType | types.BuiltinFunctionType):
            return None
        found = next(
            (vars(c)["__call__"] for c in type(target).__mro__ if "__call__" in vars(c)), 0
        )
        if not isinstance(found, types.FunctionType):
            return None
        return found if is_user_file(found.__code__.co_filename) else None

    def _call_back(self, target: Any, arguments: Arguments, frame: Frame, node: ast.Call) -> None:
        """Functions that are handed on, as to torch.cond or checkpoint: they will be called."""
        if not is_torch(target) and target not in (map, filter):
            return
        if getattr(nn.Module, getattr(target, "__name__", ""), None) is target:
            return  # a method of nn.Module gets the module as self, and hooks to call later
        functions = list(called_back(arguments))
        data = data_of(arguments)
        for function in functions:
            self.call(function, Arguments(rest=data), frame, node)

    def _call_module(
        self, module: nn.Module, arguments: Arguments, frame: Frame, node: ast.Call
    ) -> Value:
        path = self._paths.get(id(module), frame.module)
        forward = vars(module).get("forward") or type(module).forward
        forward, with_self = unwrapped(forward, arguments)
        if with_self is arguments:
            with_self = arguments.prepend(constant(module))
        if isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward:
            value = arguments.positional[0] if arguments.positional else mix(arguments.all)
            for child in module:
                value = self._call_module(child, Arguments((value,)), frame, node)
            return value
        code = getattr(forward, "__code__", None)
        if code is None or not is_user_file(code.co_filename):
            made = mix(arguments.all)
            weights = frozenset({"weights"} if any(True for _ in module.parameters()) else ())
            return Value(labels=made.labels | weights, tensor=True, sized=made.sized)
        return self._walk_function(forward, with_self, frame, node, path)

    def _walk_function(
        self,
        function: Any,
        arguments: Arguments,
        frame: Frame,
        node: ast.expr,
        path: str | None = None,
    ) -> Value:
        """A function of the user's: its result, and what it meets goes to the caller's frame."""
        function, arguments = unwrapped(function, arguments)
        if not isinstance(function, types.FunctionType):
            return guess(arguments.all)
        path = frame.module if path is None else path
        found = self._remembered(function, arguments, path)
        if found is None:
            return guess(arguments.all)
        value, met = found
        position = (getattr(node, "lineno", 0), getattr(node, "col_offset", 0))
        frame.inner[(position, id(function), path)] = met
        return value

    def _remembered(
        self, function: types.FunctionType, arguments: Arguments, path: str
    ) -> tuple[Value, list[Finding]] | None:
        named = tuple((name, key(value)) for name, value in arguments.named.items())
        rest = None if arguments.rest is None else key(arguments.rest)
        asked = (id(function), tuple(map(key, arguments.positional)), named, rest, path)
        if asked in self._memo:
            return self._memo[asked]
        is_recursion = sum(active[0] == id(function) for active in self._active) > 2
        if asked in self._active or is_recursion or len(self._active) >= DEEPEST:
            return None
        self._active.append(asked)
        self._kept.append((function, arguments))  # keys hold ids
        try:
            found = self.run(function, arguments, path)
        finally:
            self._active.pop()
        self._memo[asked] = found
        return found

    def run(
        self, function: types.FunctionType, arguments: Arguments, path: str
    ) -> tuple[Value, list[Finding]]:
        """Walk through a function: what it returns, and what it and those it calls meet."""
        code = function.__code__
        node = function_node(code)
        name = code.co_qualname  # a decorator gives its wrapper the name of what it wraps
        if node is None:
            return guess(arguments.all), [not_scanned(code, name, path)]
        names = bind_arguments(node, arguments, defaults_of(function))
        owner = None
        for free, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            try:
                content = cell.cell_contents
            except ValueError:
                continue  # not assigned yet
            if free == "__class__":
                owner = content
            names.setdefault(free, constant(content))
        frame = Frame(self, code.co_filename, name, path, names, function.__globals__, owner=owner)
        return self._result(node, frame), frame.all_met()

    def _walk_local(
        self, local: Local, arguments: Arguments, frame: Frame, node: ast.Call
    ) -> Value:
        if len(self._active) >= DEEPEST or any(active[0] == id(local) for active in self._active):
            return mix(arguments.all)
        outer = local.frame
        names = bind_arguments(local.node, arguments, local_defaults(local))
        name = getattr(local.node, "name", "<lambda>")
        inner = Frame(
            self,
            outer.file,
            f"{outer.function}.<locals>.{name}",
            frame.module,
            names,
            outer.globals,
            outer=outer,
            owner=outer.owner,
        )
        self._active.append((id(local),))
        try:
            value = self._result(local.node, inner)
        finally:
            self._active.pop()
        frame.inner[((node.lineno, node.col_offset), id(local.node), frame.module)] = (
            inner.all_met()
        )
        return value

    def _result(self, node: Any, frame: Frame) -> Value:
        if isinstance(node, ast.Lambda):
            return frame.evaluate(node.body)
        ways = execute(node.body, frame)
        returns = [*frame.returns, *([constant(None)] if ways - {"end"} else [])]
        return _joined(returns)


def _joined(values: list[Value]) -> Value:
    if not values:
        return CLEAN
    made = values[0]
    for each in values[1:]:
        made = join(made, each)
    return made
