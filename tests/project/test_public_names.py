"""Every public name has types and a docstring, and `dir` shows what there is."""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any, get_args, get_type_hints

import pytest

import enginecast
import enginecast.cache
from enginecast import errors
from enginecast.capture.sources.generation.decoder import TASKS
from enginecast.capture.sources.stateful import STATES
from enginecast.capture.tracing.attempt import Fallback
from enginecast.compiler.request import ExportRequest, ModelOptions
from enginecast.compiler.verify.bundle import verify_bundle
from enginecast.option_fields import options_of
from enginecast.runtime import Batcher
from enginecast.runtime.engine import Encoded, Engine, Outputs

CLASSES: tuple[type, ...] = (
    *(Engine, Outputs, Encoded, Batcher),
    *(each for each in vars(errors).values() if isinstance(each, type)),
    *(
        each
        for each in (getattr(enginecast.cache, name) for name in enginecast.cache.__all__)
        if isinstance(each, type)
    ),
)


def callables() -> Iterator[tuple[str, Callable[..., Any]]]:
    """The functions of the API, and the methods of its classes that are ours."""
    for name in ("compile", "load", "record", "attach"):
        yield f"enginecast.{name}", getattr(enginecast, name)
    yield "enginecast.verify", verify_bundle
    for name in enginecast.cache.__all__:
        if inspect.isfunction(each := getattr(enginecast.cache, name)):
            yield f"enginecast.cache.{name}", each
    for owner in CLASSES:
        for name, member in vars(owner).items():
            function = member.fget if isinstance(member, property) else member
            function = getattr(function, "__func__", function)
            named = not name.startswith("_") or name in ("__call__", "__repr__")
            # A dataclass writes methods of its own, which are of no file.
            if named and inspect.isfunction(function) and is_ours(function):
                yield f"{owner.__name__}.{name}", function


def is_ours(function: Any) -> bool:
    found: str = function.__globals__["__name__"]
    return found.startswith("enginecast.") and function.__code__.co_filename[0] != "<"


CALLABLES = dict(callables())


def test_dir_shows_the_verbs() -> None:
    assert {"attach", "compile", "load", "record", "verify"} <= set(dir(enginecast))
    assert set(enginecast.__all__) <= set(dir(enginecast))
    assert set(enginecast.cache.__all__) <= set(dir(enginecast.cache))
    assert callable(enginecast.verify)


def test_the_walk_finds_them() -> None:
    assert {
        *("Engine.run", "Engine.encode", "Engine.run_async", "Engine.inputs", "Engine.outputs"),
        *("Engine.manifest", "Engine.__call__", "Engine.__repr__", "Batcher.run", "Batcher.submit"),
        *("enginecast.compile", "enginecast.verify"),
    } <= CALLABLES.keys()


@pytest.mark.parametrize("name", CALLABLES)
def test_every_function_has_types_and_a_docstring(name: str) -> None:
    function = CALLABLES[name]
    assert inspect.getdoc(function), "no docstring"
    hints = function.__annotations__
    missing = [
        each.name
        for each in inspect.signature(function).parameters.values()
        if each.name not in hints and each.name not in ("self", "cls")
    ]
    assert missing == []
    assert "return" in hints


@pytest.mark.parametrize("owner", CLASSES, ids=lambda each: each.__name__)
def test_every_class_has_a_docstring(owner: type) -> None:
    assert owner.__doc__
    assert owner.__doc__ != getattr(owner.__mro__[1], "__doc__", None)


def test_types_can_be_resolved() -> None:
    for name in ("load", "compile", "record"):
        assert get_type_hints(getattr(enginecast, name))["return"] is not None


def test_what_compile_takes_are_fields_of_the_request() -> None:
    """Each option stands in a field; `compile` repeats the names alone, for type checkers."""
    known = {each.name for each in (*fields(ExportRequest), *fields(ModelOptions))}
    assert set(inspect.signature(enginecast.compile).parameters) - known == {"steps"}


def test_choices_are_those_of_the_code_that_takes_them() -> None:
    choices = {each.name: said.choices for each, said in options_of(ModelOptions) if said.choices}
    assert choices == {"fallback": get_args(Fallback), "task": TASKS, "state": STATES}
