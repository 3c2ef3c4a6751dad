"""The names of TensorRT that are called: the list, the fake, the sources and, where it can be
imported, TensorRT agree.

A green test says that each name exists.  It does not say that TensorRT does what is expected of it.
"""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from fake_tensorrt import EXTRAS, LAYERS, SOURCES, FakeTensorRT, fake_tensorrt
from fake_tensorrt_base import public
from fake_tensorrt_build import ADDED
from tensorrt_names import listed, names_in

from enginecast.errors import MissingError
from enginecast.runtime.device.versions import short_version
from enginecast.runtime.sessions.tensorrt.library import (
    import_tensorrt,
    known_apis,
    missing_names,
    names_for,
)

ROOT = Path(__file__).parents[2]
FILES = sorted(
    (*ROOT.glob("exporters/tensorrt/**/*.py"), *ROOT.glob("runtime/sessions/tensorrt/*.py"))
)
VERSIONS = ("10.15.1.29+fake", "11.0.0.114+fake")


@pytest.fixture(params=VERSIONS)
def fake(request: pytest.FixtureRequest) -> FakeTensorRT:
    return fake_tensorrt(request.param)


def test_the_list_is_sorted_and_of_the_versions_that_the_fakes_are() -> None:
    path = ROOT / "runtime/sessions/tensorrt/api.json"
    listed = json.loads(path.read_text("utf-8"))["versions"]
    assert list(listed) == [short_version(version) for version in VERSIONS]
    for classes in listed.values():
        assert list(classes) == sorted(classes)
        unsorted = {name for name, members in classes.items() if members != sorted(set(members))}
        assert unsorted == set()


def test_the_fake_has_the_listed_names_and_no_others(fake: FakeTensorRT) -> None:
    names = names_for(fake.__version__)
    assert missing_names(fake, names) == []
    assert public(list(vars(fake))) - EXTRAS == set(names)
    for name, members in names.items():
        found = public(list(vars(getattr(fake, name))))
        found -= {"log"} if name == "Logger" else set()  # which is ILogger's
        assert found <= set(members), f"{name}: {found - set(members)} not in the list"


def test_nothing_is_written_for_the_fake_that_no_version_lists() -> None:
    listed: dict[str, set[str]] = {}
    for names in known_apis().values():
        for name, members in names.items():
            listed.setdefault(name, set()).update(members)
    written = {name: public(list(vars(source))) for name, source in SOURCES.items()}
    written["INetworkDefinition"] |= set(ADDED)
    written["Logger"].discard("log")  # which is ILogger's
    unlisted = {name: found - listed.get(name, set()) for name, found in written.items()}
    assert {name: found for name, found in unlisted.items() if found} == {}
    assert set(listed) >= LAYERS


def test_the_installed_tensorrt_has_the_listed_names() -> None:
    try:
        trt = import_tensorrt("this test")
    except MissingError as error:
        if "not installed" not in str(error) and "does not load" not in str(error):
            raise  # it is here, and lacks names
        pytest.skip(str(error.message))
    assert missing_names(trt, names_for(trt.__version__)) == []


def test_a_fake_without_a_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = fake_tensorrt()
    del fake.Builder.build_serialized_network
    monkeypatch.setitem(sys.modules, "tensorrt", fake)
    with pytest.raises(MissingError, match=r"11\.0\.0\.114\+fake lacks Builder\.build_serialized"):
        import_tensorrt("this test")


def test_the_numbers_of_enums_differ_between_versions() -> None:
    old, new = (fake_tensorrt(version) for version in VERSIONS)
    assert int(old.BuilderFlag.REFIT) != int(new.BuilderFlag.REFIT)


def test_quantize_wants_its_output_type_since_11() -> None:
    old, new = (_network(fake_tensorrt(version)) for version in VERSIONS)
    assert old.add_quantize("input", "scale").name == ""
    with pytest.raises(TypeError, match="output_type"):
        new.add_quantize("input", "scale")


def _network(fake: FakeTensorRT) -> Any:
    class Log(fake.ILogger):  # type: ignore[misc, name-defined]
        pass

    return fake.Builder(Log()).create_network()


def test_what_derives_must_be_initialized(fake: FakeTensorRT) -> None:
    class Log(fake.ILogger):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            pass

    with pytest.raises(TypeError, match="whose __init__ was called"):
        fake.Builder(Log())


# What the sources use: see tests/tensorrt/tensorrt_names.py for how it is found.

# fmt: off
OURS = {
    "code", "conversion", "ctx", "dynamo", "given", "indices", "kwargs", "left", "op", "options",
    "plan", "right", "scale", "scaled", "settings", "severity", "tensors", "tt", "value",
    "values",
}
# fmt: on
"""Parameters and fields annotated `Any` that hold no object of TensorRT, or one that is only handed
on."""


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_sources_use_listed_names_only(path: Path) -> None:
    found = names_in(path.read_text(encoding="utf-8"))
    unlisted = [
        f"{path.name}:{line}: {name} is not in the list of TensorRT {version}"
        for version, names in known_apis().items()
        for line, name in found.used
        if not listed(name, names)
    ]
    assert unlisted == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_what_has_no_type_is_known_by_its_name(path: Path) -> None:
    untyped = names_in(path.read_text(encoding="utf-8")).untyped
    unknown = [f"{path.name}:{line}: {name}" for line, name in untyped if name not in OURS]
    assert unknown == [], (
        "give it a name of tests/tensorrt/tensorrt_names.py ROLES, or add it to OURS"
    )


def test_the_sources_are_looked_at() -> None:
    used = {name for path in FILES for _, name in names_in(path.read_text("utf-8")).used}
    for name in (
        "Builder",
        "BuilderFlag.STRIP_PLAN",
        "Builder.build_serialized_network",
        "IBuilderConfig.set_timing_cache",
        "ITimingCache.serialize",
        "ParserError.node_operator",
        "ICudaEngine.create_execution_context",
        "IExecutionContext.set_tensor_address",
        "INetworkDefinition.add_quantize",
    ):
        assert name in used


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("trt.IBuilder", "IBuilder"),
        ("trt.BuilderFlag.FP16", "BuilderFlag.FP16"),
        ("trt.Builder(1).platform_has_fast_fp16", "Builder.platform_has_fast_fp16"),
        ("config.int8_calibrator = None", "IBuilderConfig.int8_calibrator"),
        ("made = trt.Runtime(1); x = made.get_it()", "Runtime.get_it"),
        ("self._trt.Runtime(1).load()", "Runtime.load"),
        ("[engine.binding_is_input(i) for i in ()]", "ICudaEngine.binding_is_input"),
        ("plan.engine.max_batch_size", "ICudaEngine.max_batch_size"),
        ("c = engine.create_execution_context(); c.execute_v2(1)", "IExecutionContext.execute_v2"),
        ("ctx.net.add_input(1)", "INetworkDefinition.add_input"),
    ],
)
def test_a_name_that_is_not_listed_is_found(line: str, name: str) -> None:
    source = f"def f(self, trt: Any, config: Any, engine: Any, plan, ctx: Any):\n    {line}\n"
    found = names_in(source)
    assert name in [used for _, used in found.used]
    assert not any(listed(name, names) for names in known_apis().values())
    assert [untyped for _, untyped in found.untyped] == ["ctx"]


def test_an_object_of_ours_by_the_same_name_is_left_alone() -> None:
    source = (
        "def f(config: Path, x: Any):\n    config.resolve()\n    engine = x()\n    engine.go()\n"
    )
    assert names_in(source).used == []
