"""The real TensorRT-RTX, which parses and builds on any machine, and orders of small networks."""

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from programs import TOKENS, captured, rewritten
from tensorrt_graphs import model_of
from tensorrt_networks import save_network
from torch import Tensor, nn
from torch.export import ExportedProgram

import enginecast.ops  # noqa: F401 - registers our ops
from enginecast.exporters.target import Artifact, LoweringRequest
from enginecast.exporters.tensorrt.build import Job, Plan, build_plan
from enginecast.exporters.tensorrt.lower import (
    NETWORK_FILE,
    lower_to_tensorrt,
    lowering,
    parsed,
)
from enginecast.exporters.tensorrt.options import TensorRTRTXOptions
from enginecast.runtime.bundle.manifest import Input, ShapeRange
from enginecast.runtime.sessions.tensorrt.errors import Messages, error_logger
from enginecast.runtime.sessions.tensorrt.library import RTX

trt: Any = pytest.importorskip(
    "tensorrt_rtx_bindings", reason="TensorRT-RTX has wheels for Linux on x86-64 alone"
)
WIDTH, HEADS = 16, 2
FLOATS = {
    torch.float32: trt.float32,
    torch.float16: trt.float16,
    torch.bfloat16: trt.bfloat16,
}
RANGES = {"batch": (1, 8), "sequence": (2, 32)}
X = Input(name="x", kind="tensor", dtype="float32", shape=("batch", "sequence", WIDTH))


class Small(nn.Module):
    """A norm, an attention and a linear."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH, eps=1e-6)
        self.wide = nn.Linear(WIDTH, 3 * WIDTH)
        self.narrow = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.wide(self.norm(x)).chunk(3, -1)
        mixed = torch.ops.enginecast.attention(q, k, v, None, HEADS, HEADS, 0.3, False)
        found: Tensor = self.narrow(mixed)
        return found


def network() -> tuple[Any, Any]:
    """A builder, and an empty network of it."""
    builder = trt.Builder(error_logger(trt, Messages()))
    typed = 1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
    return builder, builder.create_network(typed)


@functools.cache
def program(dtype: torch.dtype = torch.float32) -> tuple[nn.Module, ExportedProgram]:
    """The small model and its program, for all tests."""
    torch.manual_seed(0)
    module = Small().to(dtype)
    return module, captured(module, torch.randn(3, 7, WIDTH, dtype=dtype), dynamic=TOKENS)


def order(folder: Path, options: Any = None, **changes: Any) -> LoweringRequest:
    """An order of the small program, or of the one that is given."""
    made = changes.pop("program", program()[1])
    (node,) = made.graph.find_nodes(op="placeholder")[-1:]
    symbols = dict(zip(map(str, node.meta["val"].shape), RANGES, strict=False))
    ready, _ = rewritten(made, lowering("onnx"))
    given: dict[str, Any] = {
        "outputs": ["out"],
        "symbols": symbols,
        "shapes": [("batch", "sequence", 5)],
        "device": "cuda",
        "inputs": [X],
        "ranges": RANGES,
        "options": options or TensorRTRTXOptions(),
    }
    return LoweringRequest(ready, folder, **given | changes)


def lower(folder: Path, options: Any = None, **changes: Any) -> Artifact:
    return lower_to_tensorrt(order(folder, options, **changes), RTX)


def build(
    text: str,
    folder: Path,
    constants: Mapping[str, Any] | None = None,
    profiles: Any = (),
    **changes: Any,
) -> Plan:
    """What the library makes of the text of a graph; see `tensorrt_graphs.model_of`.

    Args:
        profiles: of each, the name of an input, its least, optimal and greatest shape.
    """
    model = model_of(text, constants)
    save_network(model, folder)
    ranges = (ShapeRange(name=n, least=a, optimal=b, greatest=c) for n, a, b, c in profiles)
    wanted = LoweringRequest(program()[1], folder, (), options=TensorRTRTXOptions(**changes))
    job = Job(trt, wanted, tuple((each,) for each in ranges), {})
    return build_plan(job, parsed(trt, folder / NETWORK_FILE, model), 0)
