"""Displays and comprehensions: what is made of other values."""

import ast
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeAlias

from enginecast.capture.taint import CLEAN, Value, element, mix, sequence, truth
from enginecast.capture.taint_builtins import count_of, elements
from enginecast.capture.taint_frame import Frame
from enginecast.capture.taint_places import bind, subscript

Comprehension: TypeAlias = ast.ListComp | ast.GeneratorExp | ast.SetComp | ast.DictComp


def _display(node: ast.Tuple | ast.List, frame: Frame) -> Value:
    items: list[Value] = []
    for each in node.elts:
        if isinstance(each, ast.Starred):
            value = frame.evaluate(each.value)
            known = elements(value)
            if known is None:
                return replace(mix((*items, value)), many=True, count=count_of(value))
            items += known
        else:
            items.append(frame.evaluate(each))
    return sequence(items)


def _dict(node: ast.Dict, frame: Frame) -> Value:
    fields: dict[str, Value] = {}
    rest: list[Value] = []
    for name, content in zip(node.keys, node.values, strict=True):
        value = frame.evaluate(content)
        key = frame.evaluate(name) if name is not None else None
        if key is not None and isinstance(key.const, str):
            fields[key.const] = value
        elif key is None and value.fields is not None:
            fields.update(value.fields)
        else:
            rest.append(value)
    return Value(fields=fields) if not rest else replace(mix((*fields.values(), *rest)), many=True)


def _comprehension(node: Comprehension, frame: Frame) -> Value:
    saved = dict(frame.names)
    first = node.generators[0]
    source = frame.evaluate(first.iter)
    made = _exact(node, elements(source), frame)
    if made is None:
        bind(first.target, element(source), frame)
        counts = _counts(node, first, source, frame)
        for inner in node.generators[1:]:
            value = frame.evaluate(inner.iter)
            bind(inner.target, element(value), frame)
            counts += _counts(node, inner, value, frame)
        each = _result(node, frame)
        count = mix(counts) if counts else None
        made = replace(mix((each,)), many=True, each=each, count=count)
    frame.names = saved
    return made


def _exact(node: Comprehension, known: list[Value] | None, frame: Frame) -> Value | None:
    """The elements one by one, where the source and all tests are known."""
    if len(node.generators) > 1 or known is None:
        return None
    first = node.generators[0]
    results: list[tuple[Value, Value]] = []
    for each in known:
        bind(first.target, each, frame)
        tests = [truth(frame.evaluate(test)) for test in first.ifs]
        if None in tests:
            return None
        if all(tests):
            name = frame.evaluate(node.key) if isinstance(node, ast.DictComp) else CLEAN
            results.append((name, _result(node, frame)))
    if not isinstance(node, ast.DictComp):
        return sequence(value for _, value in results)
    if not all(isinstance(name.const, str) for name, _ in results):
        return None
    return Value(fields={name.const: value for name, value in results})


def _counts(
    node: Comprehension, generator: ast.comprehension, source: Value, frame: Frame
) -> list[Value]:
    """What decides how many elements there are; noted where that matters."""
    counts = [count] if (count := count_of(source)) is not None else []
    for count in counts:
        frame.decide("comprehension", node, generator.iter, count)
    for test in generator.ifs:
        value = frame.evaluate(test)
        if truth(value) is None and (value.is_data or "state" in value.labels):
            frame.decide("comprehension", node, test, value)
            counts.append(replace(value, tensor=False, read=value.is_data))
    return counts


def _result(node: Comprehension, frame: Frame) -> Value:
    return frame.evaluate(node.value if isinstance(node, ast.DictComp) else node.elt)


CONTAINERS: Mapping[type[ast.expr], Callable[[Any, Frame], Value]] = {
    ast.Tuple: _display,
    ast.List: _display,
    ast.Set: _display,
    ast.Dict: _dict,
    ast.ListComp: _comprehension,
    ast.SetComp: _comprehension,
    ast.GeneratorExp: _comprehension,
    ast.DictComp: _comprehension,
    ast.Subscript: subscript,
}
