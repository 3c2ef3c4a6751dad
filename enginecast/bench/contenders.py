"""What is timed: the engine, and what runs the same model without it.

engine     the bundle's engine, checks of inputs and outputs included
eager      the model as a user gets it
compile    torch.compile of it, with what it does by default
onnx       torch.onnx.export of it at these sizes, on ONNX Runtime
"""

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from enginecast.errors import EnginecastError
from enginecast.runtime.device.torch_values import as_tensor
from enginecast.runtime.engine import Engine
from enginecast.runtime.sessions.onnxruntime import create_session
from enginecast.runtime.sessions.session import PROVIDERS
from enginecast.runtime.values.arrays import Array, to_array

if TYPE_CHECKING:
    import torch
    from torch import nn

    from enginecast.capture.outputs.flatten import Wanted
    from enginecast.capture.sources.source import Source

Feeds = Sequence[Mapping[str, Array]]
"""The inputs of one call after another."""
PEERS = ("eager", "compile", "onnx")
_FLOATS = {"tensor(float)": "float32", "tensor(float16)": "float16"}
"""What an exported model may take where the engine takes floats of another size."""


class PeerError(EnginecastError):
    """A peer cannot be made or run here; the others are timed without it."""


class Contender(Protocol):
    """Something that is timed."""

    @property
    def name(self) -> str: ...
    def call(self) -> object:
        """Run all inputs once, on the device; nothing is handed over."""

    def outputs(self) -> list[dict[str, Array]]:
        """What it gives for each of them."""


@dataclass
class EngineContender:
    """The engine of a bundle."""

    engine: Engine
    feeds: Feeds
    name: str = "engine"

    def call(self) -> None:
        for each in self.feeds:
            self.engine.run(each)

    def outputs(self) -> list[dict[str, Array]]:
        return [dict(self.engine.run(each)) for each in self.feeds]


class DeviceEngineContender(EngineContender):
    """The engine of a bundle on a GPU: inputs and outputs stay there."""

    def __init__(self, engine: Engine, feeds: Feeds) -> None:
        super().__init__(engine, feeds)
        self._there = [_tensors(each, "cuda") for each in feeds]

    def call(self) -> None:
        for each in self._there:
            self.engine.run(each, as_dlpack=True, check_finite=False)


@dataclass
class ModuleContender:
    """A module of torch."""

    name: str
    module: "nn.Module"
    """Takes tensors by name, and returns them so."""
    feeds: Feeds
    device: str
    dtype: "torch.dtype"

    def __post_init__(self) -> None:
        self._there = [_tensors(each, self.device, self.dtype) for each in self.feeds]

    def call(self) -> None:
        import torch

        with torch.no_grad():
            for each in self._there:
                self.module(**each)

    def outputs(self) -> list[dict[str, Array]]:
        import torch

        with torch.no_grad():
            found = [self.module(**each) for each in self._there]
        return [{name: to_array(t.cpu().contiguous()) for name, t in f.items()} for f in found]


@dataclass
class OnnxContender:
    """A file of plain torch.onnx on ONNX Runtime."""

    session: Any
    names: Sequence[str]
    feeds: Feeds
    name: str = "onnx"

    def __post_init__(self) -> None:
        taken = {given.name: given.type for given in self.session.get_inputs()}
        self._given = [
            {n: a.astype(_FLOATS.get(taken[n], a.dtype)) for n, a in each.items() if n in taken}
            for each in self.feeds
        ]

    def call(self) -> None:
        for each in self._given:
            self.session.run(None, each)

    def outputs(self) -> list[dict[str, Array]]:
        return [
            dict(zip(self.names, self.session.run(None, each), strict=True)) for each in self._given
        ]


def on_cpu(engine: Engine) -> bool:
    """Whether the engine runs on a CPU."""
    return engine.provider.startswith("CPU") or engine.provider.endswith("-cpu")


def of_engine(engine: Engine, feeds: Feeds) -> Contender:
    """The engine where its inputs lie: in host memory, or on the GPU where torch is installed."""
    if on_cpu(engine):
        return EngineContender(engine, feeds)
    try:
        import torch  # noqa: F401
    except ImportError:
        return EngineContender(engine, feeds)
    return DeviceEngineContender(engine, feeds)


def peer(
    name: str,
    source: "Source",
    wanted: "Wanted",
    feeds: Feeds,
    *,
    device: str,
    dtype: "torch.dtype",
    threads: int | None,
) -> Contender:
    """Make one of `PEERS`.

    Args:
        dtype: in which the model runs, for "eager" and "compile"; "onnx" is made in it, too.
        threads: within an op, for ONNX Runtime; torch has one number for all of a process.

    Raises:
        PeerError: it cannot be made, or does not run.
    """
    from enginecast.capture.outputs.flatten import name_outputs
    from enginecast.capture.python.quiet import quiet_torch
    from enginecast.capture.sources.widened import widen

    module = widen(source.eager(dtype)).to(device)
    name_outputs(module, tuple(feeds[0]), wanted)
    try:
        with quiet_torch():
            if name == "onnx":
                return _plain_onnx(module, feeds, device, dtype, threads)
            if name == "compile":
                module.compile()
            made = ModuleContender(name, module, feeds, device, dtype)
            made.call()
    except Exception as error:  # whatever torch, its compiler or its exporter raises
        raise PeerError(f"{name}: {type(error).__name__}: {_first_line(error)}") from error
    return made


def _plain_onnx(
    module: "nn.Module", feeds: Feeds, device: str, dtype: "torch.dtype", threads: int | None
) -> OnnxContender:
    import torch

    given = _tensors(feeds[0], device, dtype)
    with tempfile.TemporaryDirectory(prefix="enginecast-bench-") as folder, torch.no_grad():
        file = Path(folder) / "plain.onnx"
        names = list(module(**given))
        torch.onnx.export(module, (), str(file), kwargs=given, dynamo=True, verbose=False)
        session = create_session(file, PROVIDERS[device], threads)
    made = OnnxContender(session, names, feeds)
    made.call()
    return made


def _tensors(
    feeds: Mapping[str, Array], device: str, dtype: "torch.dtype | None" = None
) -> dict[str, Any]:
    """The inputs as tensors, floats in `dtype` where one is given."""
    import torch

    def placed(array: Array) -> torch.Tensor:
        made: torch.Tensor = as_tensor(array.copy())
        floats = made.is_floating_point() and dtype is not None
        return made.to(device=device, dtype=dtype if floats else None)

    return {name: placed(array) for name, array in feeds.items()}


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else "no message"
