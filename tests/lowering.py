"""Lower programs and run what comes out: shared by the tests of exporters."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnxruntime
import torch
from programs import captured, rewritten
from torch import Tensor, nn
from torch.export import ExportedProgram

from enginecast.exporters.onnx.lower import GRAPH_FILE, lower_to_onnx, lowering
from enginecast.exporters.onnx.ops.registry import Reader, onnxruntime_on
from enginecast.exporters.target import Artifact, LoweringRequest


def lower(
    program: ExportedProgram,
    folder: Path,
    outputs: Sequence[str] = ("out",),
    symbols: Mapping[str, str] | None = None,
    device: str = "cpu",
    reader: Reader | None = None,
) -> Artifact:
    """`lower_to_onnx` into a folder that may be new; without a reader, for ONNX Runtime."""
    folder.mkdir(parents=True, exist_ok=True)
    reader = reader or onnxruntime_on(device)
    ready, _ = rewritten(program, lowering(reader))
    return lower_to_onnx(LoweringRequest(ready, folder, outputs, symbols or {}), reader)


def run(folder: Path, *inputs: Tensor) -> tuple[Tensor, ...]:
    """The outputs of the engine in a folder, on ONNX Runtime's CPU provider."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(
        folder / GRAPH_FILE, options, providers=["CPUExecutionProvider"]
    )
    feeds = {i.name: x.numpy() for i, x in zip(session.get_inputs(), inputs, strict=True)}
    return tuple(torch.from_numpy(np.asarray(found)) for found in session.run(None, feeds))


def engine_of(
    module: nn.Module, folder: Path, *inputs: Tensor, device: str = "cpu"
) -> tuple[Tensor, Artifact]:
    """What the engine of a module with one output makes of the inputs."""
    lowered = lower(captured(module, *inputs), folder, device=device)
    return run(folder, *inputs)[0], lowered


def noise(exact: Tensor, rounded: Tensor) -> float:
    """What one rounding of the dtype makes of values of this size, or torch itself when worse."""
    step = torch.finfo(rounded.dtype).eps * float(exact.abs().max())
    return max(step, float((rounded.double() - exact.double()).abs().max()))


def error(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact.double()).abs().max())
