"""What is timed: the engine, and what runs the same model without it.

engine     the bundle's engine, checks of inputs and outputs included
eager      the model as a user gets it
compile    torch.compile of it, with what it does by default
onnx       torch.onnx.export of it at these sizes, on ONNX Runtime
"""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
    from enginecast.capture.sources.base.source import Source

Feeds = Sequence[Mapping[str, Array]]
"""The inputs of one call after another."""
PEERS = ("eager", "compile", "onnx")
_FLOATS = {"tensor(float)": "float32", "tensor(float16)": "float16"}
"""What an exported model may take where the engine takes floats of another size."""


class PeerError(EnginecastError):
    """A peer cannot be made or run here; the others are timed without it."""


@dataclass(frozen=True)
class Contender:
    """Something that is timed."""

    call: Callable[[], object]
    """Runs all inputs once, on the device; nothing is handed over."""
    outputs: Callable[[], list[dict[str, Array]]]
    """What it gives for each of them."""
    on_gpu: bool = False
    """Whether the inputs and outputs of a call stay on a GPU."""


def on_cpu(engine: Engine) -> bool:
    """Whether the engine runs on a CPU."""
    return engine.provider.startswith("CPU") or engine.provider.endswith("-cpu")


def of_engine(engine: Engine, feeds: Feeds) -> Contender:
    """The engine where its inputs lie: in host memory, or on the GPU where torch is installed."""

    def outputs() -> list[dict[str, Array]]:
        return [dict(engine.run(each)) for each in feeds]

    if not on_cpu(engine):
        try:
            there = [tensors_of(each, "cuda") for each in feeds]
        except ImportError:
            pass
        else:

            def call() -> object:
                return [engine.run(each, as_dlpack=True, check_finite=False) for each in there]

            return Contender(call, outputs, on_gpu=True)
    return Contender(lambda: [engine.run(each) for each in feeds], outputs)


def eager_module(
    source: "Source", wanted: "Wanted", inputs: Sequence[str], *, device: str, dtype: "torch.dtype"
) -> "nn.Module":
    """The model as a user gets it, with inputs by name and the outputs of the engine."""
    from enginecast.capture.outputs.flatten import name_outputs
    from enginecast.capture.sources.weights.widened import widen

    module = widen(source.eager(dtype)).to(device)
    name_outputs(module, tuple(inputs), wanted)
    return module


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
    import torch

    from enginecast.capture.python.quiet import quiet_torch

    module = eager_module(source, wanted, tuple(feeds[0]), device=device, dtype=dtype)
    there = [tensors_of(each, device, dtype) for each in feeds]

    def run() -> list[dict[str, Any]]:
        with torch.no_grad():
            return [module(**each) for each in there]

    def outputs() -> list[dict[str, Array]]:
        return [{n: to_array(t.cpu().contiguous()) for n, t in each.items()} for each in run()]

    made = Contender(run, outputs)
    try:
        with quiet_torch():
            if name == "onnx":
                made = _plain_onnx(module, there[0], feeds, device, threads)
            elif name == "compile":
                module.compile()
            made.call()
    except Exception as error:  # whatever torch, its compiler or its exporter raises
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        said = lines[0] if lines else "no message"
        raise PeerError(f"{name}: {type(error).__name__}: {said}") from error
    return made


def _plain_onnx(
    module: "nn.Module", given: dict[str, Any], feeds: Feeds, device: str, threads: int | None
) -> Contender:
    import torch

    with tempfile.TemporaryDirectory(prefix="enginecast-bench-") as folder, torch.no_grad():
        file = Path(folder) / "plain.onnx"
        names = list(module(**given))
        torch.onnx.export(module, (), str(file), kwargs=given, dynamo=True, verbose=False)
        session = create_session(file, PROVIDERS[device], threads)
    taken = {one.name: one.type for one in session.get_inputs()}
    fitted = [
        {n: a.astype(_FLOATS.get(taken[n], a.dtype)) for n, a in each.items() if n in taken}
        for each in feeds
    ]

    def outputs() -> list[dict[str, Array]]:
        return [dict(zip(names, session.run(None, each), strict=True)) for each in fitted]

    return Contender(lambda: [session.run(None, each) for each in fitted], outputs)


def tensors_of(
    feeds: Mapping[str, Array], device: str, dtype: "torch.dtype | None" = None
) -> dict[str, Any]:
    """The inputs as tensors, floats in `dtype` where one is given."""
    import torch

    def placed(array: Array) -> torch.Tensor:
        made: torch.Tensor = as_tensor(array.copy())
        floats = made.is_floating_point() and dtype is not None
        return made.to(device=device, dtype=dtype if floats else None)

    return {name: placed(array) for name, array in feeds.items()}
