"""A fake of NVIDIA's `tensorrt`: exactly the names of `api.json`, and no GPU.

It stands in for TensorRT on machines that cannot have it.  Every call is recorded in its order;
`OnnxParser` reads the ONNX file, the plan holds that model, and a context computes it with ONNX
Runtime's CPU provider.  A green test proves which calls are made and that data flows through; it
proves nothing about TensorRT: not that a network builds, not what is fused, no number, no speed.

    fake = install(monkeypatch, "11.0.0.114+fake")     # `import tensorrt` gives it
    fake.calls                                         # Call("Builder.create_network", {...}), ...
    fake.called("IBuilderConfig.set_flag")             # the arguments of each such call
    fake.failures.unsupported = frozenset({"Erf"})     # what shall go wrong
"""

import enum
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import fake_tensorrt_attention
import fake_tensorrt_build
import fake_tensorrt_parser
import fake_tensorrt_run
import onnx
import pytest
from fake_tensorrt_base import Call, Failures, Overridden, Recorded, attribute, recording
from fake_tensorrt_build import ADDED, ILayer, adder, plan_of

from enginecast.runtime.device.versions import short_version
from enginecast.runtime.sessions.tensorrt.library import names_for

EXTRAS = {"calls", "called", "failures"}
"""What the fake has that tensorrt has not."""
SEVERITIES = ("INTERNAL_ERROR", "ERROR", "WARNING", "INFO", "VERBOSE")
SOURCES: dict[str, type] = {
    name: found
    for module in (
        fake_tensorrt_attention,
        fake_tensorrt_build,
        fake_tensorrt_parser,
        fake_tensorrt_run,
    )
    for name, found in vars(module).items()
    if isinstance(found, type)
    and issubclass(found, (Recorded, Overridden))
    and found not in (Recorded, Overridden)
}
"""The classes that are written out; those of layers come from `ADDED`."""
LAYERS = {kind for kind, _ in ADDED.values()}


class FakeTensorRT(ModuleType):
    """The fake module of one version."""

    def __init__(self, version: str) -> None:
        super().__init__("tensorrt", __doc__)
        self.__spec__ = ModuleSpec("tensorrt", None)  # torch looks for it when it is imported
        self.__version__ = version
        self.calls: list[Call] = []
        self.failures = Failures()
        self._severity = _enum(self, "Severity", SEVERITIES)
        names = names_for(version)
        # ILayer first: the classes of layers derive from it.
        for name in sorted(names, key=lambda name: (name in LAYERS, name)):
            setattr(self, name, _class_of(self, name, names[name]))

    def called(self, name: str) -> list[dict[str, Any]]:
        """The arguments of each call of this name, in order."""
        return [call.arguments for call in self.calls if call.name == name]

    def _new(self, kind: str, *state: Any) -> Any:
        """An object that users cannot make themselves."""
        cls = getattr(self, kind)
        if issubclass(cls, bytes):
            return cls.__new__(cls, *state)
        made = cls.__new__(cls)
        made._start(*state)
        return made


def fake_tensorrt(version: str = "11.0.0.114+fake") -> FakeTensorRT:
    """The fake of a version, with no calls recorded."""
    return FakeTensorRT(version)


def install(monkeypatch: pytest.MonkeyPatch, version: str = "11.0.0.114+fake") -> FakeTensorRT:
    """A fake that `import tensorrt` gives until the test ends."""
    fake = fake_tensorrt(version)
    monkeypatch.setitem(sys.modules, "tensorrt", fake)
    return fake


def fake_plan(fake: FakeTensorRT, model: onnx.ModelProto, **profile: Any) -> bytes:
    """The bytes of a plan of this model, without a builder.

    Args:
        model: with its weights inside.
        profile: of each dynamic input: its least, optimal and greatest shape.
    """
    plan = plan_of(fake, model)
    return type(plan)(plan.version, plan.network, profile, detailed=True).pack()


def _class_of(fake: FakeTensorRT, name: str, members: tuple[str, ...]) -> Any:
    """A class of the fake: of what is written out, the members that the list names."""
    if name in LAYERS:
        body = {m: attribute(m) for m in members}
        recorded = {m: recording(name, m, member) for m, member in body.items()}
        return type(name, (getattr(fake, ILayer.__name__),), recorded)
    if name not in SOURCES and all(member.isupper() for member in members):
        return _enum(fake, name, members)
    if name not in SOURCES:
        raise NotImplementedError(f"the fake has no {name}: write it in tests/fake_tensorrt_*.py")
    source = SOURCES[name]
    found = {**vars(source), **_adders(fake, name, members), **_severities(fake, name)}
    lacking = [member for member in members if member not in found]
    if lacking:
        raise NotImplementedError(f"the fake's {name} has no {', '.join(lacking)}: write them")
    body = {m: _member(name, m, member) for m, member in found.items() if _kept(name, m, members)}
    return type(name, _bases(fake, source), body | {"_fake": fake})


def _bases(fake: FakeTensorRT, source: type) -> tuple[type, ...]:
    """Logger is an ILogger, of which it is made first."""
    return (fake.ILogger,) if source.__name__ == "Logger" else source.__bases__


def _kept(owner: str, member: str, members: tuple[str, ...]) -> bool:
    overrides = owner == "Logger" and member == "log"
    return member.startswith("_") or member in members or overrides


def _member(owner: str, name: str, member: Any) -> Any:
    private = name.startswith("_") and name != "__init__"
    return member if private else recording(owner, name, member)


def _adders(fake: FakeTensorRT, name: str, members: tuple[str, ...]) -> dict[str, Any]:
    if name != "INetworkDefinition":
        return {}
    version = short_version(fake.__version__)
    return {member: adder(member, version) for member in members if member in ADDED}


def _severities(fake: FakeTensorRT, name: str) -> dict[str, Any]:
    return dict(fake._severity.__members__) if name in ("ILogger", "Logger") else {}


def _enum(fake: FakeTensorRT, name: str, members: tuple[str, ...]) -> Any:
    """Members with other numbers in each version, as the real ones have: nobody may keep those."""
    start = 3 if fake.__version__.startswith("10") else 5
    values = {member: start + index for index, member in enumerate(members)}
    made = enum.Enum(name, values)  # type: ignore[misc]
    made.__int__ = lambda self: self.value  # type: ignore[attr-defined]
    return made
