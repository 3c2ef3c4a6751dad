"""Functions whose code is exchanged for a `with` block."""

import ast
import functools
from collections.abc import Callable
from types import FunctionType
from typing import Any

import pytest

from enginecast.capture.python.recompile import (
    source_of,
    swapped,
)


class Doubled(ast.NodeTransformer):
    """Returns twice as much."""

    def visit_Return(self, node: ast.Return) -> ast.Return:
        assert node.value is not None
        twice = ast.BinOp(left=node.value, op=ast.Mult(), right=ast.Constant(value=2))
        return ast.copy_location(ast.Return(value=twice), node)


def doubled(function: Callable[..., Any]) -> dict[FunctionType, ast.FunctionDef]:
    source = source_of(function)
    return {source.function: Doubled().visit(source.definition)}


def noted(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def inner(*arguments: Any, **named: Any) -> Any:
        return function(*arguments, **named) + 1

    return inner


def plain(value: int, *rest: int, scale: int = 3, **named: int) -> int:
    """A documented function."""
    return value * scale


@noted
def decorated(value: int) -> int:
    return value


def closure(step: int, other: int) -> Callable[[int], int]:
    def stepped(value: int) -> int:
        return value + step - other + sum(step for _ in range(2))

    return stepped


def recursive(value: int) -> int:
    """Names itself, as code does that logs which function was called."""
    assert callable(recursive)
    return 1 if value == 0 else value + len(recursive.__name__)


def nested_recursive() -> Callable[[int], int]:
    def down(value: int) -> int:
        return 0 if value == 0 else down(value - 1) + 1

    return down


def without_wraps(function: Callable[[int], int]) -> Callable[[int], int]:
    """A decorator that keeps the function in its closure alone."""

    def inner(value: int) -> int:
        return function(value) + 1

    return inner


class Holder:
    __secret = 7

    def value(self) -> int:
        return 1

    @classmethod
    def names_itself(cls) -> bool:
        return cls is Holder and isinstance(cls(), Holder)


class Nesting(Holder):
    __own = 3

    def made(self, step: int) -> Callable[[], int]:
        def inner() -> int:
            here: Any = __class__  # type: ignore[name-defined]
            return self.__own + super(Nesting, self).value() + int(here.__own) + step

        return inner

    def with_super(self) -> Callable[[Any], int]:
        def inner(this: Any) -> int:
            return super().value() + int(this.__own)

        return inner


def local_class(step: int) -> Any:
    class Local(Holder):
        def value(self) -> int:
            assert isinstance(self, Local)
            return super().value() + step

    return Local()


@pytest.mark.parametrize(
    ("function", "call", "found", "then"),
    [
        (recursive, lambda: recursive(2), 22, 11),
        (made := nested_recursive(), lambda: made(2), 6, 2),
        (bound := Nesting().made(4), lambda: bound(), 22, 11),
        (with_super := Nesting().with_super(), lambda: with_super(Nesting()), 8, 4),
        (local := local_class(5).value, lambda: local(), 12, 6),
        (Holder.names_itself, lambda: Holder.names_itself(), 2, 1),
        (wrapper := without_wraps(plain), lambda: wrapper(1), 8, 4),
    ],
    ids=["itself", "nested", "in method", "super", "local class", "class method", "no wraps"],
)
def test_code_keeps_what_its_names_mean(
    function: Callable[..., Any], call: Callable[[], int], found: int, then: int
) -> None:
    with swapped(doubled(function)):
        assert call() == found
    assert call() == then


def test_swaps_nest_and_are_undone_after_errors() -> None:
    before = plain.__code__
    with swapped(doubled(plain)):
        middle = plain.__code__
        with pytest.raises(ZeroDivisionError), swapped(doubled(plain)):
            fails(plain(2) - 12 + (plain.__code__ is not middle))
        assert plain.__code__ is middle
    assert plain.__code__ is before


def fails(value: int) -> int:
    return value // 0
