"""Methods of lists, dicts, texts and tensors."""

import ast
import types
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from enginecast.capture.taint import (
    CLEAN,
    MAPPINGS,
    UNKNOWN,
    Value,
    constant,
    element,
    guess,
    is_plain,
    mix,
    scalar,
    sequence,
)
from enginecast.capture.taint_builtins import elements
from enginecast.capture.taint_frame import Arguments, Frame
from enginecast.capture.taint_tensors import tensor_method

MUTATORS = {
    *("append", "extend", "insert", "pop", "clear", "update", "add", "remove", "setdefault"),
    *("popitem", "discard", "appendleft", "sort", "reverse"),
}
GROWING = {"append", "add", "appendleft"}


def method_call(
    base: Value, name: str, arguments: Arguments, frame: Frame, node: ast.Call
) -> Value | None:
    """A method of a container or tensor; None when `base` is neither."""
    if name in MUTATORS and not base.tensor and _changes_module(base, frame, node):
        return CLEAN
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


def _changes_module(base: Value, frame: Frame, node: ast.Call) -> bool:
    """Whether a method changes a container that is an attribute of a module; noted if so."""
    target = node.func.value if isinstance(node.func, ast.Attribute) else None
    if not (base.many or isinstance(base.const, (list, set, dict))):
        return False
    if not isinstance(target, ast.Attribute):
        return False
    owner = frame.evaluate(target.value).const
    if not isinstance(owner, nn.Module):
        return False
    frame.meet("state", node, base, blocking=True)
    frame.walk.write_state(owner, target.attr)
    return True


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
