"""Every public name has types, a docstring with all arguments and an example that runs; `dir` shows
what there is, and nothing else.
"""

import contextlib
import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import pytest
from doc_examples import run_example
from exports import Exports, cast

import enginecast
import enginecast.cache
from enginecast import errors
from enginecast.capture.tracing.attempt import Fallback
from enginecast.compiler.request import ExportRequest, ModelOptions
from enginecast.compiler.verify.bundle import verify_bundle
from enginecast.exporters.registry import TARGETS, TargetName
from enginecast.option_fields import options_of
from enginecast.passes.presets import QUANTIZED, PrecisionName, preset
from enginecast.pipelines.attach import Replaced
from enginecast.runtime import Batcher, Generator, Stepper, generate
from enginecast.runtime.engine import Encoded, Engine, Outputs

if TYPE_CHECKING:  # the strict check of types fails where one of these ignores is not needed
    enginecast.export("model", "bundle", precision="fp61")  # type: ignore[arg-type]
    enginecast.export("model", "bundle", target="onnxruntimes")  # type: ignore[arg-type]
    enginecast.exprot("model", "bundle")  # type: ignore[attr-defined]
    enginecast.load("bundle")(1.0, x=2.0).backend.upper()
    enginecast.compile("model", "bundle", precision="int8-storage", target="openvino")

MODULES = (
    *("enginecast", "enginecast.cache", "enginecast.errors", "enginecast.exporters"),
    *("enginecast.passes", "enginecast.runtime", "enginecast.testing", "enginecast.verification"),
    *("enginecast.passes.ir.base", "enginecast.passes.ir.pattern", "enginecast.passes.ir.sites"),
    *("enginecast.exporters.target", "enginecast.runtime.sessions.session"),
)
CLASSES: tuple[type, ...] = (
    *(Engine, Outputs, Encoded, Batcher, Generator, Stepper, Replaced),
    *(each for each in vars(errors).values() if isinstance(each, type)),
    *(
        each
        for each in (getattr(enginecast.cache, name) for name in enginecast.cache.__all__)
        if isinstance(each, type)
    ),
)


def callables() -> Iterator[tuple[str, Callable[..., Any]]]:
    """The functions of the API, and the methods of its classes that are ours."""
    for name in ("export", "load", "record", "attach"):
        yield f"enginecast.{name}", getattr(enginecast, name)
    yield "enginecast.verify", verify_bundle
    yield "enginecast.runtime.generate", generate
    for name in enginecast.testing.__all__:
        if inspect.isfunction(each := getattr(enginecast.testing, name)):
            yield f"enginecast.testing.{name}", each
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


@pytest.mark.parametrize("name", MODULES)
def test_dir_shows_what_is_public_and_nothing_else(name: str) -> None:
    module = import_module(name)
    assert dir(module) == sorted(module.__all__)
    assert all(getattr(module, each) is not None for each in module.__all__)


def test_the_verbs() -> None:
    assert {"attach", "export", "load", "record", "verify"} <= set(dir(enginecast))
    assert enginecast.compile is enginecast.export
    assert callable(enginecast.verify)


def test_the_walk_finds_them() -> None:
    assert {
        *("Engine.run", "Engine.encode", "Engine.run_async", "Engine.inputs", "Engine.outputs"),
        *("Engine.manifest", "Engine.__call__", "Engine.__repr__", "Batcher.run", "Batcher.submit"),
        *("enginecast.export", "enginecast.verify"),
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


def documented(owner: object) -> set[str]:
    """The arguments that a docstring in Google's style names."""
    found = re.search(r"^Args:\n((?: {4}.*\n?|\n)+)", inspect.getdoc(owner) or "", re.MULTILINE)
    return set(re.findall(r"^ {4}\*{0,2}(\w+):", found[1], re.MULTILINE)) if found else set()


def parameters(function: Callable[..., Any]) -> set[str]:
    return set(inspect.signature(function).parameters) - {"self", "cls"}


@pytest.mark.parametrize("name", CALLABLES)
def test_every_argument_is_documented(name: str) -> None:
    assert documented(CALLABLES[name]) >= parameters(CALLABLES[name])


@pytest.mark.parametrize("owner", CLASSES, ids=lambda each: each.__name__)
def test_every_argument_of_a_class_is_documented(owner: type) -> None:
    made_elsewhere = "Made by `" in (owner.__doc__ or "")
    init = vars(owner).get("__init__")
    if inspect.isfunction(init) and is_ours(init) and not made_elsewhere:
        assert documented(owner) >= parameters(init)


EXAMPLES = (
    *("enginecast.export", "enginecast.record", "enginecast.load", "enginecast.verify"),
    *("enginecast.attach", "Engine.__call__", "Engine.run", "Engine.encode", "Batcher"),
    *("enginecast.cache.open_cache", "EmbeddingCache", "CachedEncoder", "Variants"),
    *("enginecast.cache.as_dataset", "enginecast.cache.collate", "ShardShuffle"),
    *("enginecast.cache.require_frozen", "enginecast.cache.as_huggingface"),
    *("enginecast.testing.capture", "enginecast.testing.run_passes", "enginecast.testing.compare"),
)


def test_the_examples_run(
    tmp_path: Path, exports: Exports, capsys: pytest.CaptureFixture[str]
) -> None:
    """In one folder, in order: the first one writes the bundle that others load."""
    (tmp_path / "t5.bundle").symlink_to(exports("t5").folder)
    texts, cache = tmp_path / "texts.txt", tmp_path / "captions.cache"
    texts.write_text("a red fox\nrain\n", encoding="utf-8")
    filled = cast(capsys, "cache", "fill", exports("t5").folder, "--prompts", texts, "-o", cache)
    assert filled.code == 0, filled.err
    owners = {**CALLABLES, **{each.__name__: each for each in CLASSES}}
    with contextlib.chdir(tmp_path):
        for name in EXAMPLES:
            run_example(owners[name], name)


def test_every_public_function_has_an_example() -> None:
    functions = {name for name in CALLABLES if name.startswith("enginecast.")}
    small = {name for name in functions if name.startswith("enginecast.testing.")}
    assert functions - small - {"enginecast.runtime.generate"} <= set(EXAMPLES)


@pytest.mark.parametrize("owner", CLASSES, ids=lambda each: each.__name__)
def test_every_class_has_a_docstring(owner: type) -> None:
    assert owner.__doc__
    assert owner.__doc__ != getattr(owner.__mro__[1], "__doc__", None)


def test_what_export_takes_are_fields_of_the_request() -> None:
    """Each option stands in a field; `export` repeats the names alone, for type checkers."""
    known = {each.name for each in (*fields(ExportRequest), *fields(ModelOptions))}
    assert set(inspect.signature(enginecast.export).parameters) - known == {"steps", "download"}


def test_names_for_type_checkers_are_those_that_there_are() -> None:
    assert get_args(TargetName) == tuple(TARGETS)
    assert set(QUANTIZED) < set(get_args(PrecisionName))
    assert all(preset(name) for name in get_args(PrecisionName))
    with pytest.raises(errors.UsageError, match=", ".join(get_args(PrecisionName)[:4])):
        preset("fp61")


def test_choices_are_those_of_the_code_that_takes_them() -> None:
    choices = {each.name: said.choices for each, said in options_of(ModelOptions) if said.choices}
    assert choices == {"fallback": get_args(Fallback)}
