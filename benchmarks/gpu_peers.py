"""The engines that others make, on one case each: eager, torch.compile, torchao."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import torch
from gpu_models import Case
from torch import Tensor, nn
from torch.export import ExportedProgram

from enginecast.passes.ir.base import PassContext
from enginecast.passes.ir.pipeline import run_pipeline
from enginecast.passes.registry import build

OUTPUT = "hidden"
SMOKE = {"backend": "eager"}
"""Of torch.compile on a CPU, where it only shows that a script works."""
WARM_RUNS = 3
"""A compiled model records a CUDA graph in its second run, and replays it from the third on."""


class AbsentError(Exception):
    """This engine is not available here; says why."""


@dataclass(frozen=True)
class Bench:
    """A model at one size, ready for engines to be made of it."""

    case: Case
    encoder: nn.Module
    """In `dtype`, on `device`."""
    device: str
    dtype: torch.dtype
    program: Callable[[], ExportedProgram]
    """The model captured at this size; its weights are in CPU memory."""

    @property
    def arch(self) -> str:
        """ "sm90", or "cpu"."""
        if self.device != "cuda":
            return "cpu"
        return "sm{}{}".format(*torch.cuda.get_device_capability())


@dataclass(frozen=True)
class Made:
    """An engine, ready to run on the inputs of its case."""

    run: Callable[[], Tensor]
    """Gives the output where it was computed; the next run may write over it."""
    shared_bytes: int = 0
    """Of weights on the device that it shares with the eager model."""
    details: Mapping[str, Any] = field(default_factory=dict)
    """More to write down."""


def captured(encoder: nn.Module, case: Case) -> ExportedProgram:
    """Capture a model whose weights are in CPU memory at the sizes of one case, functionalized."""
    inputs = {name: tensor.cpu() for name, tensor in case.inputs.items()}
    with torch.no_grad():
        program = torch.export.export(encoder, (), inputs, strict=False)
    run_pipeline(build("functionalize"), program, PassContext())
    return program


def on_cpu(encoder: nn.Module) -> nn.Module:
    """The same weights in CPU memory, without a second copy on the device; ties stay ties."""
    memo: dict[int, Any] = {
        id(parameter): nn.Parameter(parameter.cpu(), requires_grad=False)
        for parameter in encoder.parameters()
    }
    return copy.deepcopy(encoder, memo).cpu()


def weight_bytes(encoder: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in encoder.parameters())


def eager(bench: Bench) -> Made:
    """The model as it is."""

    def run() -> Tensor:
        with torch.no_grad():
            found: Tensor = bench.encoder(**bench.case.inputs)
        return found

    return Made(run, weight_bytes(bench.encoder))


def compiled(bench: Bench, mode: str = "max-autotune") -> Made:
    """torch.compile with what makes it fastest: its mode also records CUDA graphs.

    Args:
        mode: "reduce-overhead" only does that, and compiles sooner.
    """
    torch._dynamo.reset()
    return _compile(bench, bench.encoder, weight_bytes(bench.encoder), mode)


def torchao_fp8(bench: Bench) -> Made:
    """torchao's dynamic fp8 with a scale for each row, compiled the same way."""
    if find_spec("torchao") is None:
        raise AbsentError("torchao is not installed")
    if bench.device != "cuda":
        raise AbsentError("torchao multiplies in fp8 on a GPU only")
    from torchao.quantization import (
        Float8DynamicActivationFloat8WeightConfig,
        PerRow,
        quantize_,
    )

    model = copy.deepcopy(bench.encoder)
    quantize_(model, Float8DynamicActivationFloat8WeightConfig(granularity=PerRow()))
    return _compile(bench, model, 0, "max-autotune")


def _compile(bench: Bench, model: nn.Module, shared: int, mode: str) -> Made:
    how: dict[str, Any] = {"mode": mode} if bench.device == "cuda" else SMOKE
    fast = torch.compile(model, dynamic=False, **how)

    def run() -> Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        with torch.no_grad():
            found: Tensor = fast(**bench.case.inputs)
        return found

    for _ in range(WARM_RUNS):
        run()
    return Made(run, shared)
