"""The engines that others make, on one case each: eager, torch.compile, torchao, ONNX Runtime."""

import copy
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from gpu_models import Case
from torch import Tensor, nn
from torch.export import ExportedProgram

from enginecast.exporters.onnx.lower import GRAPH_FILE, lower_to_onnx, lowering
from enginecast.exporters.onnx.ops.registry import onnxruntime_on
from enginecast.exporters.target import LoweringRequest
from enginecast.passes.ir.base import PassContext
from enginecast.passes.ir.edit import structural_copy
from enginecast.passes.ir.pipeline import run_pipeline
from enginecast.passes.presets import preset
from enginecast.passes.registry import build

OUTPUT = "hidden"
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
    hidden_bytes: int = 0
    """Of weights on the device that torch's allocator does not count."""
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


def compiled(bench: Bench) -> Made:
    """torch.compile with what makes it fastest: its mode also records CUDA graphs."""
    return _compile(bench, bench.encoder, weight_bytes(bench.encoder))


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
    return _compile(bench, model, 0)


def _compile(bench: Bench, model: nn.Module, shared: int) -> Made:
    fast = torch.compile(model, mode="max-autotune", dynamic=False)

    def run() -> Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        with torch.no_grad():
            found: Tensor = fast(**bench.case.inputs)
        return found

    for _ in range(WARM_RUNS):
        run()
    return Made(run, shared)


def ort(bench: Bench) -> Made:
    """Our own graph on ONNX Runtime: fp16 by CUDA's provider, fp32 on a CPU."""
    import onnxruntime

    provider = "CUDAExecutionProvider" if bench.device == "cuda" else "CPUExecutionProvider"
    if provider not in onnxruntime.get_available_providers():
        raise AbsentError("onnxruntime-gpu is not installed")
    if bench.device == "cuda":
        onnxruntime.preload_dlls()
    precision = "fp16" if bench.device == "cuda" else "fp32"
    pipeline = preset(precision, device=bench.device)
    if precision == "fp32":
        pipeline = f"unify-dtype{{to=fp32}},{pipeline}"  # the weights are stored in bf16
    program = structural_copy(bench.program())
    context = PassContext(calibration=(_inputs_of(bench),))
    size = sum(t.numel() for t in program.state_dict.values()) * (2 if precision == "fp16" else 4)
    reader = onnxruntime_on(bench.device)
    run_pipeline(build(f"{pipeline},{lowering(reader)}"), program, context)
    with tempfile.TemporaryDirectory() as folder:
        lower_to_onnx(LoweringRequest(program, Path(folder), [OUTPUT]), reader)
        session = onnxruntime.InferenceSession(Path(folder) / GRAPH_FILE, providers=[provider])
    if session.get_providers()[0] != provider:
        raise AbsentError(f"ONNX Runtime does not start {provider} here")
    hidden = size if bench.device == "cuda" else 0
    return Made(_bound(session, bench), hidden_bytes=hidden, details={"precision": precision})


def _inputs_of(bench: Bench) -> dict[str, Tensor]:
    return {name: tensor.cpu() for name, tensor in bench.case.inputs.items()}


def _bound(session: Any, bench: Bench) -> Callable[[], Tensor]:
    """Run with inputs and output where they are on the device."""
    import numpy

    binding = session.io_binding()
    for name, tensor in bench.case.inputs.items():
        kind = numpy.float32 if tensor.is_floating_point() else numpy.int64
        shape = tuple(tensor.shape)
        binding.bind_input(name, bench.device, 0, kind, shape, tensor.data_ptr())
    binding.bind_output(OUTPUT, bench.device)

    def run() -> Tensor:
        session.run_with_iobinding(binding)
        binding.synchronize_outputs()
        (found,) = binding.get_outputs()
        return torch.from_dlpack(found._ortvalue.to_dlpack())

    return run
