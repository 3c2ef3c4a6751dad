"""What the classes of the fake TensorRT are made from: recording, and the plan that they pass on.

A fake: see tests/tensorrt/fake_tensorrt.py.
"""

import functools
import inspect
import json
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from types import FunctionType
from typing import Any, NamedTuple

PLAN_MAGIC = b"FAKE-TENSORRT-PLAN\0"
CACHE_MAGIC = b"FAKE-TENSORRT-TIMING\0"


class Call(NamedTuple):
    """One call or assignment, as it was made."""

    name: str
    """ "Builder.create_network"; "Builder" for making one; "IBuilderConfig.progress_monitor="."""
    arguments: dict[str, Any]
    """By the names of the parameters; "value" of an assignment."""


@dataclass
class Failures:
    """What a test wants to go wrong.  Nothing does unless it is asked for."""

    unsupported: frozenset[str] = frozenset()
    """ONNX ops that the parser has no importer for."""
    build: str = ""
    """The build gives None, and this message is reported to the error recorder and the logger."""
    build_silently: bool = False
    """The build gives None, and nothing is reported."""
    deserialize: str = ""
    """Deserializing gives None, and this message is reported."""
    execute: str = ""
    """Execution gives False, and this message is reported."""
    steps: int = 4
    """Steps of the build that the progress monitor hears of."""
    during_step: Callable[[int], None] = field(default=lambda step: None)
    """Called before each step is reported: it may raise, say KeyboardInterrupt."""


class Recorded:
    """Base of all classes of the fake: refuses what pybind11's classes refuse."""

    _fake: Any

    def __init__(self, *args: object, **kwargs: object) -> None:
        raise TypeError(f"fake tensorrt.{type(self).__name__}: No constructor defined!")

    def __setattr__(self, name: str, value: object) -> None:
        # pybind11's objects take no attributes of their own.
        if not name.startswith("_") and not hasattr(type(self), name):
            raise AttributeError(f"fake tensorrt.{type(self).__name__} has no attribute '{name}'")
        object.__setattr__(self, name, value)

    def _report(self, message: str, code: str = "INTERNAL_ERROR") -> None:
        """As TensorRT does: to the error recorder of this object, if any, and to the logger."""
        recorder = getattr(self, "_error_recorder", None)
        if recorder is not None:
            # The real bindings look this override up by another name than they document.
            recorder.get_num_errors()
            recorder.report_error(getattr(self._fake.ErrorCodeTRT, code), message)
        logger = getattr(self, "_logger", None)
        if logger is not None:
            logger.log(self._fake.ILogger.ERROR, message)


class Overridden:
    """Base of the classes that users derive from: those take attributes.

    A derived class has to call this `__init__`, which pybind11 insists on.
    """

    _fake: Any

    def __init__(self) -> None:
        self._ready = True


def require_ready(thing: Any, kind: type) -> Any:
    """What pybind11 does with an argument of another class, or one that was never initialized."""
    if not isinstance(thing, kind) or not getattr(thing, "_ready", False):
        raise TypeError(f"expected a {kind.__name__} whose __init__ was called, got {thing!r}")
    return thing


def attribute(name: str, start: object = None) -> property:
    """A property that keeps what it is given."""

    def get(self: Any) -> Any:
        return getattr(self, f"_{name}", start)

    def put(self: Any, value: object) -> None:
        object.__setattr__(self, f"_{name}", value)

    return property(get, put)


def recording(owner: str, name: str, member: Any) -> Any:
    """The member of a class, made to record each call of it or each assignment to it."""
    if isinstance(member, property):
        return property(member.fget, member.fset and _recording_setter(owner, name, member.fset))
    if isinstance(member, FunctionType):
        return _recording_method(owner if name == "__init__" else f"{owner}.{name}", member)
    return member


def _recording_setter(owner: str, name: str, put: Callable[..., None]) -> Callable[..., None]:
    def record(self: Any, value: object) -> None:
        self._fake.calls.append(Call(f"{owner}.{name}=", {"value": value}))
        put(self, value)

    return record


def _recording_method(label: str, method: FunctionType) -> Callable[..., Any]:
    signature = inspect.signature(method)

    @functools.wraps(method)
    def record(self: Any, *args: Any, **kwargs: Any) -> Any:
        arguments = dict(signature.bind(self, *args, **kwargs).arguments)
        arguments.pop("self")
        self._fake.calls.append(Call(label, arguments))
        return method(self, *args, **kwargs)

    return record


@dataclass(frozen=True)
class Plan:
    """What the fake's serialized engine holds."""

    version: str
    network: bytes
    """An ONNX model with its weights; empty: the network was not parsed from ONNX."""
    profile: Mapping[str, Sequence[Sequence[int]]] = field(default_factory=dict)
    """Input -> least, optimal, greatest shape."""
    flags: Sequence[str] = ()
    """Builder flags, by name."""
    stripped: Sequence[str] = ()
    """Weights that are left out."""
    detailed: bool = False
    """Whether it was built with ProfilingVerbosity.DETAILED."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """What else the builder's config said."""

    def pack(self) -> bytes:
        described = asdict(self)
        network: bytes = described.pop("network")
        header = json.dumps(described | {"fake": True, "size": len(network)}).encode()
        return PLAN_MAGIC + struct.pack("<Q", len(header)) + header + network


def unpack_plan(data: bytes) -> Plan:
    """What was packed.

    Raises:
        ValueError: these bytes are not such a plan, or not all of it.
    """
    if not data.startswith(PLAN_MAGIC):
        raise ValueError("magic tag does not match: this is not a plan of the fake TensorRT")
    start = len(PLAN_MAGIC) + 8
    if len(data) < start:
        raise ValueError("the plan is cut off in its header")
    (length,) = struct.unpack("<Q", data[start - 8 : start])
    try:
        header = json.loads(data[start : start + length])
    except ValueError as error:
        raise ValueError("the plan is cut off in its header") from error
    network = data[start + length :]
    if len(network) != header.pop("size"):
        raise ValueError("the plan is cut off in its network")
    header.pop("fake")
    return Plan(network=network, **header)


def pack_cache(version: str, entries: Mapping[str, float]) -> bytes:
    return CACHE_MAGIC + json.dumps({"version": version, "entries": entries}).encode()


def unpack_cache(data: bytes) -> tuple[str, dict[str, float]]:
    """The version that made a timing cache, and its entries.

    Raises:
        ValueError: these bytes are not a timing cache.
    """
    if not data.startswith(CACHE_MAGIC):
        raise ValueError("the timing cache is damaged")
    try:
        found = json.loads(data[len(CACHE_MAGIC) :])
    except ValueError as error:
        raise ValueError("the timing cache is damaged") from error
    return found["version"], found["entries"]


def public(names: Iterator[str] | Sequence[str]) -> set[str]:
    return {name for name in names if not name.startswith("_")}
