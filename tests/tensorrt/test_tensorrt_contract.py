"""The names of TensorRT that are called: the list, the fake, the sources and, where it can be
imported, TensorRT agree.

A green test says that each name exists.  It does not say that TensorRT does what is expected of it.
"""

from pathlib import Path

import pytest
from fake_tensorrt import EXTRAS, FakeTensorRT, fake_tensorrt
from fake_tensorrt_base import public
from tensorrt_names import listed, names_in

from enginecast.errors import MissingError
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


def test_the_fake_has_the_listed_names_and_no_others(fake: FakeTensorRT) -> None:
    names = names_for(fake.__version__)
    assert missing_names(fake, names) == []
    assert public(list(vars(fake))) - EXTRAS == set(names)
    for name, members in names.items():
        found = public(list(vars(getattr(fake, name))))
        found -= {"log"} if name == "Logger" else set()  # which is ILogger's
        assert found <= set(members), f"{name}: {found - set(members)} not in the list"


def test_the_installed_tensorrt_has_the_listed_names() -> None:
    try:
        trt = import_tensorrt("this test")
    except MissingError as error:
        if "not installed" not in str(error) and "does not load" not in str(error):
            raise  # it is here, and lacks names
        pytest.skip(str(error.message))
    assert missing_names(trt, names_for(trt.__version__)) == []


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
