"""The Python functions that a module's forward methods reach."""

import sys
from collections.abc import Collection, Iterator
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import nn

from enginecast.capture.python.locations import (
    SourceLocation,
    is_user_code,
    line_numbers,
    real_path,
)

MOST_FUNCTIONS = 20_000


def functions_at(module: nn.Module, places: Collection[SourceLocation]) -> tuple[FunctionType, ...]:
    """The functions that hold `places`; where they are inside each other, the innermost."""
    files = {real_path(file) for file, _ in places}
    found = [f for f in reachable(module, files) if _file(f) in files]
    chosen: dict[int, FunctionType] = {}
    for file, line in (place.resolved for place in places):
        holders = [f for f in found if _file(f) == file and _holds(f.__code__, line)]
        if holders:
            first = max(holder.__code__.co_firstlineno for holder in holders)
            innermost = [h for h in holders if h.__code__.co_firstlineno == first]
            chosen |= {id(holder): holder for holder in innermost}
    return tuple(chosen.values())


def user_functions(module: nn.Module) -> tuple[FunctionType, ...]:
    """Those that no installed package defines."""
    return tuple(f for f in reachable(module, set()) if _is_users(f))


def _is_users(function: FunctionType) -> bool:
    """Whether the user wrote it; what a library generates, as dataclasses do, is the library's."""
    file = _file(function)
    if file.startswith("<"):
        module = sys.modules.get(function.__module__)
        file = getattr(module, "__file__", None) or file
    return is_user_code(file)


def _file(function: FunctionType) -> str:
    return real_path(function.__code__.co_filename)


def reachable(module: nn.Module, files: Collection[str]) -> tuple[FunctionType, ...]:
    """Functions that the forward methods may call, by the names in their code.

    Inside installed packages only functions of `files`, without links, are followed.
    """
    waiting: list[Any] = [owner.forward for owner in module.modules()]
    waiting += [value for owner in module.modules() for value in vars(owner).values()]
    seen: dict[int, Any] = {}
    found: list[FunctionType] = []
    for owner in {type(owner) for owner in module.modules()}:
        waiting += [getattr(owner, "forward", None)]
    classes = tuple({type(owner) for owner in module.modules()})
    while waiting and len(seen) < MOST_FUNCTIONS:
        value = waiting.pop(0)
        if id(value) in seen:
            continue
        for function in _functions(value):
            if id(function) in seen:
                continue
            seen[id(function)] = function
            file = _file(function)
            if _is_users(function) or file in files or function.__name__ == "forward":
                found.append(function)
                waiting += _called(function, classes)
            waiting += _held(function)
    return tuple(found)


def _functions(value: Any) -> Iterator[FunctionType]:
    if isinstance(value, MethodType):
        value = value.__func__
    if isinstance(value, staticmethod | classmethod):
        value = value.__func__
    if isinstance(value, property):
        yield from (f for f in (value.fget,) if isinstance(f, FunctionType))
    if isinstance(value, FunctionType):
        yield value


def _held(function: FunctionType) -> list[Any]:
    """What a function has in its closure or wraps: decorators keep functions there."""
    held = [getattr(function, "__wrapped__", None)]
    for cell in function.__closure__ or ():
        try:
            held.append(cell.cell_contents)
        except ValueError:  # not bound yet
            continue
    return held


def _called(function: FunctionType, classes: tuple[type, ...]) -> list[Any]:
    """What the names in its code may mean: globals, attributes of modules, methods."""
    names = _names(function.__code__)
    called: list[Any] = []
    for name in names:
        value = function.__globals__.get(name)
        if isinstance(value, ModuleType):
            called += [vars(value).get(other) for other in names]
        elif isinstance(value, type):
            called += [vars(value).get(other) for other in (*names, "__init__", "__call__")]
        else:
            called.append(value)
        called += [vars(base).get(name) for owner in classes for base in owner.__mro__]
    return [value for value in called if value is not None]


def _names(code: CodeType) -> set[str]:
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= _names(constant)
    return names


def _holds(code: CodeType, line: int) -> bool:
    return code.co_firstlineno <= line <= max(line_numbers(code), default=0)
