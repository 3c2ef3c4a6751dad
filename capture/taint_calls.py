"""Calls: what is called, with what, and what becomes of it where it is not walked through."""

import ast
import functools
import types
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from enginecast.capture.refusal import is_user_code
from enginecast.capture.taint import (
    CLEAN,
    MAPPINGS,
    UNKNOWN,
    Value,
    constant,
    element,
    guess,
    is_plain,
    join,
    mix,
    scalar,
    sequence,
    tensor_from,
)
from enginecast.capture.taint_builtins import call_builtin, elements
from enginecast.capture.taint_frame import Arguments, Frame, Local
from enginecast.capture.taint_lookup import Bound
from enginecast.capture.taint_places import OneOf
from enginecast.capture.taint_source import FunctionNode
from enginecast.capture.taint_tensors import is_math, python_number, tensor_method, torch_call

MUTATORS = {
    *("append", "extend", "insert", "pop", "clear", "update", "add", "remove", "setdefault"),
    *("popitem", "discard", "appendleft", "sort", "reverse"),
}
REGISTER = (nn.Module.register_buffer, nn.Module.register_parameter, nn.Module.__setattr__)
GROWING = {"append", "add", "appendleft"}


def arguments_of(node: ast.Call, frame: Frame) -> Arguments:
    """The arguments of a call, with * and ** spread where what they hold is known."""
    positional: list[Value] = []
    named: dict[str, Value] = {}
    rest: list[Value] = []
    for each in node.args:
        if not isinstance(each, ast.Starred):
            positional.append(frame.evaluate(each))
            continue
        value = frame.evaluate(each.value)
        known = elements(value)
        if known is None:
            rest.append(element(value))
        else:
            positional += known
    for keyword in node.keywords:
        value = frame.evaluate(keyword.value)
        if keyword.arg is not None:
            named[keyword.arg] = value
        elif value.fields is not None:
            named.update(value.fields)
        elif isinstance(value.const, dict):
            named.update({str(name): constant(each) for name, each in value.const.items()})
        else:
            rest.append(element(value))
    return Arguments(tuple(positional), named, mix(rest) if rest else None)


def method_call(
    base: Value, name: str, arguments: Arguments, frame: Frame, node: ast.Call
) -> Value | None:
    """A method of a container or tensor; None when `base` is neither."""
    if base.items is not None or base.many:
        return _container_method(base, name, arguments, frame, node)
    if base.fields is not None and not base.is_known:
        return _mapping_method(base, name, arguments, frame, node)
    if isinstance(base.const, str | tuple | int | float):
        return _computed_method(base, name, arguments)
    if isinstance(base.const, (list, set, *MAPPINGS)):
        return _outer_container(base, name, arguments, frame, node)
    if base.tensor and (not base.is_known or isinstance(base.const, Tensor)):
        return tensor_method(base, name, arguments, frame, node)
    return None


def is_own(container: Any, name: str) -> bool:
    """Whether a method of a container is the user's own."""
    return isinstance(getattr(type(container), name, None), types.FunctionType)


def _computed_method(base: Value, name: str, arguments: Arguments) -> Value:
    """A method of a text, number or tuple, which has no side effects."""
    is_known = all(is_plain(value) or isinstance(value.const, tuple) for value in arguments.all)
    if not is_known or arguments.rest is not None or name.startswith("__"):
        return scalar((base, *arguments.all))
    named = {key: value.const for key, value in arguments.named.items()}
    try:
        method = getattr(base.const, name)
        return constant(method(*(value.const for value in arguments.positional), **named))
    except Exception:  # what it would raise in a run is not known here
        return CLEAN


def _rebind(node: ast.Call, value: Value, frame: Frame) -> None:
    target = node.func.value if isinstance(node.func, ast.Attribute) else None
    if isinstance(target, ast.Name) and target.id in frame.names:
        frame.names[target.id] = value


def _container_method(
    base: Value, name: str, arguments: Arguments, frame: Frame, node: ast.Call
) -> Value:
    if name in GROWING and base.items is not None and arguments.positional:
        _rebind(node, sequence((*base.items, arguments.positional[-1])), frame)
        return constant(None)
    if name in ("append", "extend", "insert", "add", "update"):
        made = replace(mix((base, *arguments.all)), many=True, count=base.count)
        _rebind(node, made, frame)
        return constant(None)
    if name == "pop":
        return element(base)
    if name == "copy":
        return base
    if name in ("items", "keys", "values"):
        return replace(base, each=None)
    if name in ("index", "count"):
        return scalar((base, *arguments.all))
    return guess((element(base), *arguments.all))


def _mapping_method(
    base: Value, name: str, arguments: Arguments, frame: Frame, node: ast.Call
) -> Value:
    fields = dict(base.fields or {})
    first = arguments.positional[0] if arguments.positional else CLEAN
    default = arguments.positional[1] if len(arguments.positional) > 1 else constant(None)
    if name in ("get", "pop", "setdefault") and isinstance(first.const, str):
        found = fields.get(first.const, default)
        if name == "pop":
            fields.pop(first.const, None)
            _rebind(node, replace(base, fields=fields), frame)
        return found
    if name == "items":
        return sequence(sequence((constant(key), each)) for key, each in fields.items())
    if name in ("values", "to_tuple"):
        return sequence(fields.values())
    if name == "keys":
        return sequence(map(constant, fields))
    if name == "update":
        added = dict(arguments.named) | dict(first.fields or {})
        _rebind(node, replace(base, fields={**fields, **added}), frame)
        return constant(None)
    return base if name == "copy" else guess((base, *arguments.all))


def _outer_container(
    base: Value, name: str, arguments: Arguments, frame: Frame, node: ast.Call
) -> Value:
    """A list or dict that was there before the model ran."""
    target = node.func.value if isinstance(node.func, ast.Attribute) else None
    if name in MUTATORS and isinstance(target, ast.Attribute):
        owner = frame.evaluate(target.value).const
        if isinstance(owner, nn.Module):
            frame.meet("state", node, base, blocking=True)
            frame.walk.write_state(owner, target.attr)
            return CLEAN
    first = arguments.positional[0] if arguments.positional else CLEAN
    if name == "get" and isinstance(base.const, MAPPINGS) and first.is_known:
        try:
            found = base.const.get(first.const, UNKNOWN)
        except TypeError:
            return CLEAN
        default = arguments.positional[1] if len(arguments.positional) > 1 else constant(None)
        return default if found is UNKNOWN else constant(found)
    known = elements(base)
    if name in ("values", "items") and isinstance(base.const, MAPPINGS) and known is not None:
        if name == "values":
            return sequence(map(constant, base.const.values()))
        return sequence(sequence(map(constant, pair)) for pair in base.const.items())
    return scalar((base, *arguments.all))


def unwrapped(function: Any, arguments: Arguments) -> tuple[Any, Arguments]:
    """What is really called: partials, bound methods and caches are opened."""
    for _ in range(20):
        if isinstance(function, Bound):
            arguments = arguments.prepend(function.receiver)
            function = function.function
        elif isinstance(function, types.MethodType):
            arguments = arguments.prepend(constant(function.__self__))
            function = function.__func__
        elif isinstance(function, functools.partial):
            named = {name: constant(each) for name, each in function.keywords.items()}
            positional = tuple(map(constant, function.args))
            arguments = Arguments(
                (*positional, *arguments.positional),
                {**named, **arguments.named},
                arguments.rest,
            )
            function = function.func
        elif isinstance(function, functools._lru_cache_wrapper) or _is_wrapper_of_torch(function):
            function = function.__wrapped__
        else:
            break
    return function, arguments


def _is_wrapper_of_torch(function: Any) -> bool:
    """A decorator of torch's own (no_grad) around a function of the user."""
    if not isinstance(function, types.FunctionType) or not hasattr(function, "__wrapped__"):
        return False
    return not is_user_file(function.__code__.co_filename)


@functools.lru_cache(maxsize=4096)
def is_user_file(file: str) -> bool:
    return is_user_code(file)


def is_torch(function: Any) -> bool:
    """Whether a callable belongs to torch."""
    if isinstance(function, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        return True
    module = getattr(function, "__module__", None) or ""
    if not isinstance(module, str):
        return False
    owner = getattr(function, "__objclass__", None) or getattr(function, "__self__", None)
    is_of_tensor = isinstance(owner, type) and issubclass(owner, torch._C.TensorBase)
    return module.split(".")[0] == "torch" or is_of_tensor or owner is torch._C._VariableFunctions


def outside_call(function: Any, arguments: Arguments, frame: Frame, node: ast.Call) -> Value:
    """A callable that is not walked through: Python's, torch's, another library's, a class."""
    found = call_builtin(function, arguments, frame, node)
    if found is None and isinstance(function, types.MethodDescriptorType) and arguments.positional:
        receiver, *others = arguments.positional
        passed = Arguments(tuple(others), arguments.named, arguments.rest)
        found = method_call(receiver, function.__name__, passed, frame, node)
    if found is not None:
        return found
    if is_math(function) and len(arguments.positional) == 1:
        return python_number(function, arguments.positional[0], frame, node)
    if function in REGISTER:
        owner = arguments.positional[0]
        frame.meet("state", node, owner, blocking=True)
        return constant(None)
    if is_torch(function):
        return torch_call(function, arguments, frame, node)
    values = arguments.all
    module = str(getattr(function, "__module__", "") or "")
    made = mix(values)
    if module.split(".")[0] == "numpy" and made.tensor:
        return frame.read("numpy", node, made, blocking=True)
    if isinstance(function, type) and not issubclass(function, nn.Module | Tensor):
        return _instance(function, arguments)
    if callable(function) and made.tensor and _is_compiled(function, module):
        frame.meet("not-scanned", node, made, blocking=False)
    return guess(values)


def _instance(kind: type, arguments: Arguments) -> Value:
    """An object that the code makes: dataclasses and outputs keep their fields."""
    names = list(getattr(kind, "__dataclass_fields__", {}))
    fields = dict(zip(names, arguments.positional, strict=False)) | dict(arguments.named)
    if fields and (names or not arguments.positional):
        absent = {name: constant(None) for name in names if name not in fields}
        return Value(fields=fields | absent)
    return guess(arguments.all)


def _is_compiled(function: Any, module: str) -> bool:
    """Code of an extension: there is no source of it to look at."""
    if isinstance(function, types.FunctionType | type | nn.Module):
        return False
    is_builtin = isinstance(function, types.BuiltinFunctionType)
    return is_builtin and module.split(".")[0] not in ("", "builtins", "torch", "math", "operator")


def bind_arguments(
    node: FunctionNode, arguments: Arguments, defaults: dict[str, Value]
) -> dict[str, Value]:
    """The names of a function's parameters."""
    spec = node.args
    names = [each.arg for each in (*spec.posonlyargs, *spec.args)]
    named = dict(arguments.named)
    found: dict[str, Value] = dict(zip(names, arguments.positional, strict=False))
    for name in [*names[len(arguments.positional) :], *(each.arg for each in spec.kwonlyargs)]:
        if name in named:
            found[name] = named.pop(name)
            continue
        default = defaults.get(name)
        if arguments.rest is None:
            found[name] = default or CLEAN
        else:
            found[name] = arguments.rest if default is None else join(arguments.rest, default)
    if spec.vararg is not None:
        found[spec.vararg.arg] = _variadic(arguments, len(names))
    if spec.kwarg is not None:
        extra = {name: value for name, value in named.items() if name not in found}
        rest = arguments.rest
        made = Value(fields=extra)
        found[spec.kwarg.arg] = made if rest is None else replace(guess((made, rest)), many=True)
    return found


def _variadic(arguments: Arguments, taken: int) -> Value:
    left = arguments.positional[taken:]
    if arguments.rest is None:
        return sequence(left)
    return replace(mix((*left, arguments.rest)), many=True)


CALLED_BACK = (
    *(types.FunctionType, types.MethodType, functools.partial, nn.Module),
    *(Bound, Local, OneOf),
)


def called_back(arguments: Arguments) -> Iterable[Value]:
    """Functions of the user that are handed to a function that is not walked through."""
    for value in arguments.all:
        for each in (value, *(value.items or ())):
            if isinstance(each.const, CALLED_BACK):
                yield each


def data_of(arguments: Arguments) -> Value:
    """What a function gets that is called back: any of the tensors that go along."""
    values = [
        value
        for value in arguments.all
        if not isinstance(value.const, Local | Bound) and not callable(value.const)
    ]
    made = mix(values)
    return tensor_from(values) if made.tensor else scalar(values)
