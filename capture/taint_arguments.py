"""From the arguments of a call to the names of a function's parameters."""

import ast
import types
from dataclasses import replace

from enginecast.capture.taint import CLEAN, Value, constant, element, guess, join, mix, sequence
from enginecast.capture.taint_builtins import elements
from enginecast.capture.taint_frame import Arguments, Frame, Local
from enginecast.capture.taint_source import FunctionNode


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


def defaults_of(function: types.FunctionType) -> dict[str, Value]:
    """The defaults of a function's parameters."""
    code = function.__code__
    names = code.co_varnames[: code.co_argcount]
    given = function.__defaults__ or ()
    found = dict(zip(names[len(names) - len(given) :], map(constant, given), strict=True))
    return found | {k: constant(v) for k, v in (function.__kwdefaults__ or {}).items()}


def local_defaults(local: Local) -> dict[str, Value]:
    """The same, of a function that is not made yet."""
    spec = local.node.args
    names = [each.arg for each in (*spec.posonlyargs, *spec.args)]
    found = {
        name: local.frame.evaluate(default)
        for name, default in zip(
            names[len(names) - len(spec.defaults) :], spec.defaults, strict=True
        )
    }
    for each, default in zip(spec.kwonlyargs, spec.kw_defaults, strict=True):
        if default is not None:
            found[each.arg] = local.frame.evaluate(default)
    return found
