"""Subscripts, and what is assigned to."""

import ast
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from enginecast.capture.taint import (
    MAPPINGS,
    Value,
    constant,
    element,
    guess,
    mix,
    scalar,
    sequence,
    tensor_from,
)
from enginecast.capture.taint_builtins import elements
from enginecast.capture.taint_frame import Frame


def subscript(node: ast.Subscript, frame: Frame) -> Value:
    """`base[index]`."""
    base = frame.evaluate(node.value)
    if base.is_one_tensor or (base.tensor and base.is_data):
        return _indexed(base, node, frame)
    index = _index(node.slice, frame)
    if index.is_known:
        found = _picked(base, index.const)
        if found is not None:
            return found
    if isinstance(base.const, nn.ModuleList | nn.ModuleDict):
        children = base.const.values() if isinstance(base.const, nn.ModuleDict) else base.const
        return sequence(map(constant, children)) if _is_slice(node) else any_of(children)
    if base.is_known and not isinstance(base.const, Tensor):
        return scalar((index,))
    if _is_slice(node) and (base.many or base.items is not None):
        return replace(element(base), many=True, count=base.count)
    if base.many:
        return element(base)
    return guess((base, scalar((index,)))) if base.items is None else element(base)


def any_of(choices: Any) -> Value:
    """One of several objects, which are all walked through when it is called."""
    return Value(const=OneOf(tuple(choices)))


class OneOf:
    """One of several modules: which one is not known."""

    def __init__(self, choices: tuple[Any, ...]) -> None:
        self.choices = choices


def _is_slice(node: ast.Subscript) -> bool:
    return isinstance(node.slice, ast.Slice)


def _index(node: ast.expr, frame: Frame) -> Value:
    if not isinstance(node, ast.Slice):
        return frame.evaluate(node)
    bounds = [
        constant(None) if bound is None else frame.evaluate(bound)
        for bound in (node.lower, node.upper, node.step)
    ]
    if all(isinstance(bound.const, int | type(None)) for bound in bounds):
        return constant(slice(*(bound.const for bound in bounds)))
    return scalar(bounds)


def _picked(base: Value, index: Any) -> Value | None:
    """An element, or some, of a container whose elements are known."""
    if isinstance(index, str) and base.fields is not None:
        return base.fields.get(index)
    items = base.items
    if items is None and base.fields is not None and isinstance(index, int | slice):
        items = tuple(base.fields.values())
    try:
        if items is not None:
            found = items[index]
            return sequence(found) if isinstance(index, slice) else found
        if isinstance(base.const, (list, tuple, range, nn.ModuleList, nn.ModuleDict, *MAPPINGS)):
            return constant(base.const[index])
        if isinstance(base.const, nn.Sequential) and isinstance(index, int):
            return constant(base.const[index])
    except (LookupError, TypeError, RuntimeError):
        return None
    return None


def _indexed(base: Value, node: ast.Subscript, frame: Frame) -> Value:
    """`tensor[...]`: a mask or a bound that is data makes sizes that depend on values."""
    places = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
    values: list[Value] = []
    is_view, is_sized = True, base.sized
    for place in places:
        if isinstance(place, ast.Slice):
            bounds = [frame.evaluate(b) for b in (place.lower, place.upper, place.step) if b]
            data = [bound for bound in bounds if bound.is_data]
            if data:
                is_sized = True
                frame.meet("index", node, data[0], blocking=False, shown=place)
            values += bounds
            continue
        value = frame.evaluate(place)
        values.append(value)
        if value.tensor:
            is_view, is_sized = False, is_sized or value.sized or value.mask
        if value.mask:
            frame.meet("mask-index", node, value, blocking=False, shown=place)
    made = tensor_from((replace(base, many=False, count=None), *values))
    owner = base.owner if is_view else ""
    return replace(made, sized=is_sized, mask=base.mask and not is_sized, owner=owner)


def bind(target: ast.expr, value: Value, frame: Frame) -> None:
    """Assign `value` to a target."""
    if isinstance(target, ast.Name):
        frame.names[target.id] = value
    elif isinstance(target, ast.Starred):
        bind(target.value, replace(mix((value,)), many=True), frame)
    elif isinstance(target, ast.Tuple | ast.List):
        _unpack(target, value, frame)
    elif isinstance(target, ast.Attribute):
        _bind_attribute(target, value, frame)
    elif isinstance(target, ast.Subscript):
        _bind_element(target, value, frame)


def _unpack(target: ast.Tuple | ast.List, value: Value, frame: Frame) -> None:
    known = elements(value) if not value.tensor or value.items is not None else None
    is_starred = any(isinstance(each, ast.Starred) for each in target.elts)
    if known is not None and len(known) == len(target.elts) and not is_starred:
        for each, item in zip(target.elts, known, strict=True):
            bind(each, item, frame)
        return
    for each in target.elts:
        bind(each, replace(element(value), owner=""), frame)


def _bind_attribute(target: ast.Attribute, value: Value, frame: Frame) -> None:
    base = frame.evaluate(target.value)
    if isinstance(base.const, nn.Module):
        if value.owner == target.attr:
            return  # `self.table = self.table.to(x.device)` keeps what it holds
        frame.write(target, base, target.attr, value)
        return
    if base.fields is not None and isinstance(target.value, ast.Name):
        fields = {**base.fields, target.attr: value}
        frame.names[target.value.id] = replace(base, fields=fields)


def _bind_element(target: ast.Subscript, value: Value, frame: Frame) -> None:
    base = frame.evaluate(target.value)
    index = _index(target.slice, frame) if not base.tensor else mix((_indices(target, frame),))
    if base.owner:
        frame.meet("state", target, base, blocking=True)
        frame.walk.write_state(None, base.owner)
        return
    if isinstance(base.const, list | dict | set) and _is_of_module(target.value, frame):
        frame.meet("state", target, base, blocking=True)
        return
    if not isinstance(target.value, ast.Name) or target.value.id not in frame.names:
        return
    frame.names[target.value.id] = _with_element(base, index, value)


def _indices(target: ast.Subscript, frame: Frame) -> Value:
    bounds = [node for node in ast.walk(target.slice) if isinstance(node, ast.Name | ast.Call)]
    return mix([frame.evaluate(node) for node in bounds if isinstance(node, ast.expr)])


def _is_of_module(node: ast.expr, frame: Frame) -> bool:
    """Whether a container is an attribute of a module."""
    return isinstance(node, ast.Attribute) and isinstance(
        frame.evaluate(node.value).const, nn.Module
    )


def _with_element(base: Value, index: Value, value: Value) -> Value:
    if isinstance(index.const, str) and base.fields is not None:
        return replace(base, fields={**base.fields, index.const: value})
    if base.items is not None and isinstance(index.const, int):
        items = list(base.items)
        if -len(items) <= index.const < len(items):
            items[index.const] = value
            return sequence(items)
    if base.is_one_tensor:
        written = tensor_from((base, value, index))
        return replace(written, sized=base.sized, mask=base.mask)
    make = guess if base.fields is not None else mix
    made = make((base, value, scalar((index,))))
    return replace(made, many=True, count=base.count)
