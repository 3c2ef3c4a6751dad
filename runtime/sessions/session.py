"""The base class of sessions: it opens and runs the engines of one target."""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from enginecast.public import listing
from enginecast.runtime.bundle.manifest import EngineRecord
from enginecast.runtime.bundle.reader import Bundle
from enginecast.runtime.device.versions import installed
from enginecast.runtime.sessions.settings import DEFAULT, Settings
from enginecast.runtime.values.arrays import Array
from enginecast.runtime.values.device_tensor import Feed

__all__ = [
    "PROVIDERS",
    "NodeTimes",
    "Session",
    "Stop",
]
__dir__ = listing(__all__)

PROVIDERS = {
    "cpu": ("CPUExecutionProvider",),
    "cuda": ("CUDAExecutionProvider", "CPUExecutionProvider"),
}
"""ONNX Runtime's execution providers by device, the wanted one first."""


@dataclass(frozen=True)
class NodeTimes:
    """The times of an engine's nodes, from its runtime's profiler."""

    runs: int
    nodes: tuple[tuple[str, str, float], ...]
    """Name, op without its domain, and microseconds in one run: the median over the runs.  In the
    order in which they ran first; the nodes are those that the runtime's own optimizer left."""


class Stop:
    """Stops a run from another thread, once."""

    def __init__(self) -> None:
        self.reason = ""
        """Why it was stopped; empty: it was not."""
        self._act: Callable[[], None] | None = None
        self._lock = threading.Lock()

    def set_act(self, act: Callable[[], None] | None) -> None:
        """Say how the run is stopped; None: it is over."""
        with self._lock:
            self._act = act
            if act is not None and self.reason:
                act()

    def stop(self, reason: str) -> None:
        """Stop it, now or as soon as it begins."""
        with self._lock:
            self.reason = self.reason or reason
            if self._act is not None:
                self._act()


class Session(ABC):
    """An opened engine file.  Safe to call from several threads at once.

    The class attributes tell the loader about a target before it opens an engine.  A module that
    defines a session imports neither torch nor the library that runs the engine: `open` does.
    """

    name: ClassVar[str]
    """The target whose engines it runs, as the manifest names it."""
    runs_code: ClassVar[bool] = True
    """Whether loading the file can run code, which the user has to allow."""
    copies_weights: ClassVar[bool] = False
    """Whether `open` only maps or copies weights, so that they may be checked at the same time."""
    providers: ClassVar[Mapping[str, str]] = {}
    """What runs an engine where one of ONNX Runtime's providers was asked for:
    {"CPUExecutionProvider": "torch-cpu"}.  Such an engine was made for one device.  Empty: ONNX
    Runtime's own providers run it."""
    packages: ClassVar[tuple[str, ...]] = ()
    """The Python distributions that run it, the nearest last: a verdict keeps their versions."""
    can_stop: ClassVar[bool] = False
    """Whether a run under way can be stopped."""
    tunable: ClassVar[tuple[str, ...]] = ()
    """The fields of `Settings` that change how fast it is on a CPU; empty: `open` gets none."""

    @classmethod
    @abstractmethod
    def open(
        cls,
        bundle: Bundle,
        record: EngineRecord,
        providers: Sequence[str],
        threads: int | None,
        *,
        cuda_graphs: bool = True,
        counts_ops: bool = False,
        settings: Settings = DEFAULT,
    ) -> Self:
        """Open an engine of a bundle.

        Args:
            bundle: a bundle whose digests were checked; with `copies_weights`, those of weights may
                be checked meanwhile.
            record: the engine, of this target.
            providers: ONNX Runtime's names, the wanted one first, or one of `providers`' values.
            threads: threads within one operator; None: as many as the runtime takes.
            cuda_graphs: whether it may record runs on a GPU whose shapes repeat.
            counts_ops: whether `executed_ops` is asked for, which slows the first run.
            settings: how it runs; given to sessions alone that have something `tunable`.

        Raises:
            MissingError: this machine cannot run the engine.
            UsageError: the engine was made for another device.
            BundleError: the runtime refuses the file.
        """

    @classmethod
    def misfit(cls, record: EngineRecord) -> str:
        """Why this machine would compute an engine wrong, by its record; empty: it does not."""
        return ""

    @property
    @abstractmethod
    def provider(self) -> str:
        """The provider that runs the engine, such as "CPUExecutionProvider" or "torch-cuda"."""

    @abstractmethod
    def run(self, feeds: Mapping[str, Feed], outputs: Sequence[str]) -> dict[str, Any]:
        """Run on checked feeds; return values that speak DLPack, where the provider left them."""

    @abstractmethod
    def to_host(self, value: Any) -> Array:
        """View one of `run`'s values as an array in CPU memory."""

    def run_to_host(self, feeds: Mapping[str, Feed], outputs: Sequence[str]) -> dict[str, Array]:
        """Run on checked feeds; return arrays in CPU memory."""
        return {name: self.to_host(value) for name, value in self.run(feeds, outputs).items()}

    def stopping(self, run: Stop) -> AbstractContextManager[None]:
        """Let a run that this thread begins inside be stopped by `run`; with `can_stop` alone."""
        raise NotImplementedError

    def layers(self) -> tuple[str, ...]:
        """The engine's layers in words, one fact per line; empty if the runtime reports none."""
        return ()

    def versions(self) -> dict[str, str]:
        """The versions of those of `packages` that are installed."""
        return installed(*self.packages)

    def executed_ops(self) -> tuple[str, ...] | None:
        """The types of the ops that the first run executed, in order, without their domains; a
        loop's body once per turn.  None: the session was not opened with `counts_ops`, or its
        runtime does not say.
        """
        return None

    @classmethod
    def node_times(
        cls,
        bundle: Bundle,
        record: EngineRecord,
        providers: Sequence[str],
        threads: int | None,
        feeds: Mapping[str, Feed],
        seconds: float,
    ) -> NodeTimes | None:
        """Open an engine once more and time each node of it, for about so many seconds; None: its
        runtime does not time nodes.
        """
        return None

    @property
    def backend(self) -> str:
        """What runs the engine, in the words of `load`'s `prefer`: "onnxruntime-cpu"; of other
        providers "onnxruntime-openvino".
        """
        if self.name in self.backends():
            return self.name
        of_onnxruntime = {theirs: name for name, theirs in self.providers.items()}
        provider = of_onnxruntime.get(self.provider, self.provider)
        return f"{self.name}-{provider.removesuffix('ExecutionProvider').lower()}"

    @classmethod
    def provider_for(cls, provider: str) -> str:
        """The provider of this target that corresponds to a provider of ONNX Runtime."""
        return cls.providers.get(provider, provider)

    @classmethod
    def backends(cls) -> dict[str, str]:
        """Device by the name that `load`'s `prefer` has for it: {"onnxruntime-cpu": "cpu"}."""
        devices = [
            device
            for device in ("cuda", "cpu")
            if not cls.providers or PROVIDERS[device][0] in cls.providers
        ]
        if len(devices) == 1:
            return {cls.name: devices[0]}
        return {f"{cls.name}-{device}": device for device in devices}
