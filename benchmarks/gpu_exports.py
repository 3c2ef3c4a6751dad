"""Engines as users export them: verified on the device, loaded by the name of their backend."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from gpu_models import OUTPUT, Case, Subject
from gpu_peers import AbsentError, Made
from torch import Tensor
from torch.utils.dlpack import from_dlpack

import enginecast
from enginecast.compiler.request import ModelOptions
from enginecast.errors import MissingError
from enginecast.exporters.registry import target_of
from enginecast.exporters.tensorrt.options import TensorRTOptions
from enginecast.runtime.device.gpu import arch_of
from enginecast.runtime.engine import Engine


@dataclass(frozen=True)
class Build:
    """One way to make an engine of a model."""

    target: str
    precision: str
    device: str = "cuda"
    route: str = ""
    """Of TensorRT: "onnx" or "torch"."""

    @property
    def name(self) -> str:
        """Of its row."""
        return " ".join(part for part in (self.target, self.route, self.precision) if part)

    @property
    def backend(self) -> str:
        """As `load`'s `prefer` calls it."""
        return self.target if "tensorrt" in self.target else f"{self.target}-{self.device}"


BUILDS = {
    "t5": (
        Build("onnxruntime", "fp16"),
        Build("aotinductor", "bf16"),
        Build("aotinductor", "fp8"),
        Build("tensorrt", "fp16", route="onnx"),
        Build("tensorrt", "fp8", route="onnx"),
        Build("tensorrt", "fp16", route="torch"),
        Build("tensorrt-rtx", "fp16"),
    ),
    "vit": (
        Build("onnxruntime", "fp16"),
        Build("aotinductor", "bf16"),
        Build("tensorrt", "fp16", route="onnx"),
        Build("tensorrt-rtx", "fp16"),
    ),
    # TensorRT has computed one wrongly at batch sizes above 1:
    # https://github.com/NVIDIA/TensorRT/issues/4853
    "segformer": (
        Build("onnxruntime", "fp32"),
        Build("tensorrt", "fp32", route="onnx"),
        Build("tensorrt-rtx", "fp32"),
    ),
}
"""What is exported of each model, on a GPU."""
DRY = (Build("onnxruntime", "fp32", "cpu"), Build("aotinductor", "fp32", "cpu"))
"""Instead of these, on a CPU."""


def exported(subject: Subject, folder: Path, output: Path, build: Build, case: Case) -> Made:
    """Export and verify an engine on the device, and load it.

    Raises:
        AbsentError: this machine lacks what runs it.
        EnginecastError: it was rejected, or does not load.
    """
    if build.target == "onnxruntime" and build.device == "cuda":
        import onnxruntime

        onnxruntime.preload_dlls()
    try:
        bundle = enginecast.export(folder, output, target=build.target, **_options(subject, build))
        engine = enginecast.load(
            bundle.root,
            prefer=[build.backend],
            allow_code=True,
            require="verified-by-emulation",
        )
    except MissingError as error:
        raise AbsentError(f"{error.message}; {error.hint}") from error
    if engine.verdict.outcome != "verified":
        raise RuntimeError("; ".join(("it was not verified on the GPU", *engine.verdict.reasons)))
    feeds = dict(case.inputs)

    def run() -> Tensor:
        """Inputs and output stay on the device."""
        found = engine.run(feeds, as_dlpack=True, check_finite=False)
        tensor: Tensor = from_dlpack(found[OUTPUT])
        return tensor

    return Made(run, details=_details(engine))


def _options(subject: Subject, build: Build) -> dict[str, Any]:
    found: dict[str, Any] = {
        "precision": build.precision,
        "device": build.device,
        "options": ModelOptions(dynamic=subject.dynamic),
    }
    if build.precision == "fp8":  # of every layer whose error allows it, faster or not
        arch = arch_of(torch)
        text = target_of(build.target).pipeline("fp8", device=build.device, arch=arch)
        spelled = text if "plan-fp8{" in text else text.replace("plan-fp8", "plan-fp8{}")
        wanted = spelled.replace("plan-fp8{", "plan-fp8{min_gain=0.0 ").replace("0.0 }", "0.0}")
        found |= {"precision": None, "arch": arch, "pipeline": wanted}
    if build.route:
        route: Any = build.route
        found["target_options"] = TensorRTOptions(route=route, optimal=subject.optimal())
    return found


def _details(engine: Engine) -> dict[str, Any]:
    """What the bundle and the runtime say of an engine."""
    record = engine.record
    return {
        "backend": engine.backend,
        "verdict": msgspec.to_builtins(engine.verdict),
        "requires": record.requires,
        "profile": msgspec.to_builtins(record.profile),
        "layers": list(engine.layers()),
        "file_bytes": (engine.folder / record.file).stat().st_size,
        "notes": list(engine.manifest.notes),
    }
