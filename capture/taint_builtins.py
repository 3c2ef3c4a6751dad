"""What Python's own functions make of values that are not run."""

import ast
import builtins
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from enginecast.capture.taint import (
    CLEAN,
    MAPPINGS,
    PLAIN,
    UNKNOWN,
    Value,
    constant,
    element,
    mix,
    scalar,
    sequence,
    shape_of,
    truth,
)
from enginecast.capture.taint_frame import Arguments, Frame
from enginecast.capture.taint_tensors import python_number, tensor_attribute

SEQUENCES = (
    *(nn.ModuleList, nn.Sequential, nn.ParameterList),
    *(tuple, list, range, set, frozenset),
)
MOST_ELEMENTS = 64
"""Longer loops over known elements are walked through once, for all of them."""


def elements(value: Value) -> list[Value] | None:
    """The elements of a container one by one, where they are known and few."""
    if value.items is not None:
        return list(value.items) if len(value.items) <= MOST_ELEMENTS else None
    if value.fields is not None and not value.is_known:
        return [constant(name) for name in value.fields]
    const = value.const
    if isinstance(const, (nn.ModuleDict, *MAPPINGS)):
        found: list[Any] = list(const.keys())
    elif isinstance(const, SEQUENCES):
        if len(const) > MOST_ELEMENTS:
            return None
        found = list(const)
    else:
        return None
    return [constant(each) for each in found] if len(found) <= MOST_ELEMENTS else None


def call_builtin(function: Any, arguments: Arguments, frame: Frame, node: ast.Call) -> Value | None:
    """A builtin; None when it is not one of those that matter."""
    handler = _HANDLERS.get(function) if _is_hashable(function) else None
    if handler is None or arguments.rest is not None:
        return None
    return handler(arguments, frame, node)


def _is_hashable(function: object) -> bool:
    return isinstance(function, type) or (
        callable(function) and type(function).__hash__ is not None
    )


def _len(arguments: Arguments, frame: Frame, node: ast.Call) -> Value:
    value = arguments.positional[0]
    known = elements(value)
    if known is not None:
        return constant(len(known))
    if value.is_one_tensor:
        return shape_of(value)
    return scalar((value.count,)) if value.count is not None else CLEAN


def _isinstance(arguments: Arguments, frame: Frame, node: ast.Call) -> Value:
    value, kinds = arguments.positional[:2]
    classes = _classes(kinds)
    if classes is None:
        return CLEAN
    if value.is_one_tensor:
        if any(issubclass(kind, Tensor) for kind in classes if kind is not Tensor):
            return CLEAN
        return constant(Tensor in classes)
    if value.items is not None or value.fields is not None:
        return CLEAN
    return constant(isinstance(value.const, classes)) if value.is_known else CLEAN


def _classes(value: Value) -> tuple[type, ...] | None:
    if isinstance(value.const, type):
        return (value.const,)
    found = value.const if isinstance(value.const, tuple) else ()
    if value.items is not None:
        found = tuple(item.const for item in value.items)
    return found if found and all(isinstance(each, type) for each in found) else None


def _range(arguments: Arguments, frame: Frame, node: ast.Call) -> Value:
    values = arguments.positional
    if all(isinstance(value.const, int) for value in values):
        return constant(range(*(value.const for value in values)))
    for value in values:
        if value.is_data and not value.read:
            frame.read("item", node, value)
    bounds = scalar(values)
    if any(value.is_data for value in values):
        bounds = replace(bounds, read=True, vague=False)
    return Value(labels=bounds.labels, read=bounds.read, many=True, count=bounds)


def _enumerate(arguments: Arguments, frame: Frame, node: ast.Call) -> Value:
    known = elements(arguments.positional[0])
    if known is not None:
        return sequence(sequence((constant(i), each)) for i, each in enumerate(known))
    return _of_many((CLEAN, arguments.positional[0]), arguments.positional[:1])


def _zip(arguments: Arguments, frame: Frame, node: ast.Call) -> Value:
    known = [elements(value) for value in arguments.positional]
    if known and all(each is not None for each in known):
        rows = zip(*(each for each in known if each is not None), strict=False)
        return sequence(map(sequence, rows))
    return _of_many(arguments.positional, arguments.positional)


def _of_many(contents: tuple[Value, ...], counted: tuple[Value, ...]) -> Value:
    """A container whose elements are tuples of the elements of others."""
    row = sequence(element(value) if value is not CLEAN else CLEAN for value in contents)
    counts = [count_of(value) for value in counted]
    count = mix(each for each in counts if each is not None) if any(counts) else None
    made = mix(contents)
    return replace(made, many=True, count=count, each=row)


def count_of(value: Value) -> Value | None:
    """What decides how often a loop over `value` runs; None where nothing of the model does."""
    if value.items is not None or value.is_known:
        return None
    if value.many:
        return value.count
    return shape_of(value) if value.is_one_tensor else None


def _same(arguments: Arguments, frame: Frame, node: ast.Call) -> Value:
    """list, tuple, set, reversed, iter: the same elements; a set may hold some twice here."""
    if not arguments.positional:
        return sequence(())
    value = arguments.positional[0]
    known = elements(value)
    if known is not None:
        is_reversed = isinstance(node.func, ast.Name) and node.func.id == "reversed"
        return sequence(reversed(known) if is_reversed else known)
    return replace(value, many=True, const=UNKNOWN, count=count_of(value))


def _getattr(arguments: Arguments, frame: Frame, node: ast.Call) -> Value | None:
    value, name = arguments.positional[:2]
    if not isinstance(name.const, str):
        return mix((value,))
    if value.is_known and not isinstance(value.const, Tensor):
        found = frame.attribute(value, name.const)
        if found is not None:
            return found
    elif value.is_one_tensor and hasattr(Tensor, name.const):
        return tensor_attribute(value, name.const)
    default = arguments.positional[2] if len(arguments.positional) > 2 else None
    if default is None:
        return mix((value,))
    return default if value.is_known and not isinstance(value.const, Tensor) else mix((value,))


def _hasattr(arguments: Arguments, frame: Frame, node: ast.Call) -> Value:
    value, name = arguments.positional[:2]
    if not isinstance(name.const, str) or not value.is_known:
        return CLEAN
    return constant(True) if frame.attribute(value, name.const) is not None else CLEAN


def _compared(arguments: Arguments, frame: Frame, node: ast.Call) -> Value:
    """min, max, any, all, sorted: Python compares the elements."""
    values = [
        inner
        for value in arguments.positional
        for inner in (value.items if value.items is not None else (element(value),))
    ]
    made = mix(values)
    if any(value.is_data and not value.read for value in values):
        frame.meet("boolean", node, made, blocking=True)
        is_predicate = isinstance(node.func, ast.Name) and node.func.id in ("any", "all")
        return replace(made, tensor=not is_predicate, read=is_predicate)
    if all(isinstance(value.const, int | float) for value in values) and values:
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        if name in ("min", "max"):
            return constant(getattr(builtins, name)(value.const for value in values))
    return scalar(values)


def _print(arguments: Arguments, frame: Frame, node: ast.Call) -> Value:
    made = mix(arguments.all)
    if made.tensor or made.read:
        frame.meet("print", node, made, blocking=False)
    return constant(None)


def _dict(arguments: Arguments, frame: Frame, node: ast.Call) -> Value:
    if not arguments.positional:
        return Value(fields=dict(arguments.named))
    first = arguments.positional[0]
    if first.fields is not None:
        return Value(fields={**first.fields, **arguments.named})
    return mix(arguments.all)


def _setattr(arguments: Arguments, frame: Frame, node: ast.Call) -> Value:
    owner, name = arguments.positional[:2]
    if isinstance(owner.const, nn.Module):
        written = arguments.positional[2] if len(arguments.positional) > 2 else CLEAN
        frame.write(node, owner, str(name.const), written)
    return constant(None)


def _text(arguments: Arguments, frame: Frame, node: ast.Call) -> Value:
    value = arguments.positional[0] if arguments.positional else constant("")
    return (
        constant(str(value.const)) if isinstance(value.const, (*PLAIN, type)) else scalar((value,))
    )


def _type(arguments: Arguments, frame: Frame, node: ast.Call) -> Value:
    value = arguments.positional[0]
    return constant(type(value.const)) if value.is_known and not value.tensor else CLEAN


def _bool(arguments: Arguments, frame: Frame, node: ast.Call) -> Value:
    if not arguments.positional:
        return constant(False)
    value = arguments.positional[0]
    known = truth(value)
    if known is not None:
        return constant(known)
    return python_number(bool, value, frame, node)


def _number(function: Any) -> Callable[[Arguments, Frame, ast.Call], Value]:
    def handle(arguments: Arguments, frame: Frame, node: ast.Call) -> Value:
        if len(arguments.positional) != 1:
            return scalar(arguments.all)
        return python_number(function, arguments.positional[0], frame, node)

    return handle


def _no_data(arguments: Arguments, frame: Frame, node: ast.Call) -> Value:
    return CLEAN


_HANDLERS: Mapping[Any, Callable[[Arguments, Frame, ast.Call], Value | None]] = {
    len: _len,
    isinstance: _isinstance,
    issubclass: _no_data,
    callable: _no_data,
    id: _no_data,
    range: _range,
    enumerate: _enumerate,
    zip: _zip,
    reversed: _same,
    list: _same,
    tuple: _same,
    set: _same,
    frozenset: _same,
    iter: _same,
    getattr: _getattr,
    hasattr: _hasattr,
    setattr: _setattr,
    **dict.fromkeys((min, max, any, all, sorted), _compared),
    print: _print,
    dict: _dict,
    type: _type,
    str: _text,
    bool: _bool,
    int: _number(int),
    float: _number(float),
    complex: _number(complex),
}
