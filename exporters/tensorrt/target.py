"""The targets of TensorRT and TensorRT-RTX, which build engines from the same network."""

from pathlib import Path
from typing import Any, ClassVar

import torch

from enginecast.errors import MissingError
from enginecast.exporters.onnx.fp32_twin import open_twin
from enginecast.exporters.target import Artifact, LoweringRequest, Target
from enginecast.exporters.tensorrt.build import built_for
from enginecast.exporters.tensorrt.lower import (
    NETWORK_FILE,
    lower_to_tensorrt,
    lowering,
    require_library,
)
from enginecast.exporters.tensorrt.options import (
    NetworkOptions,
    TensorRTOptions,
    TensorRTRTXOptions,
)
from enginecast.exporters.tensorrt.profiles import profiles_of
from enginecast.runtime.device import gpu as gpus
from enginecast.runtime.sessions.session import Session
from enginecast.runtime.sessions.tensorrt.library import RTX, TENSORRT, Library, import_tensorrt


class TensorRT(Target):
    """An engine for one GPU model, made on it."""

    name = TENSORRT.name
    library: ClassVar[Library] = TENSORRT
    arithmetic = "tensorrt"
    has_skip_norm = False
    options: ClassVar[type[NetworkOptions]] = TensorRTOptions
    products = "tensorrt"
    explicit_quantization = True
    copies = 2  # in the engine, and in the network that it is built from
    accepts_second = True
    only_device = "cuda"
    scales_as_computed = True

    def quantized_dtype(self, device: str) -> str:
        return "fp16"  # as on ONNX Runtime, so that one program makes an engine for both

    def require(self, options: Any) -> None:
        require_library(self.library, options or self.options())

    def require_arch(self, arch: str, options: Any) -> None:
        here = gpus.Gpu(torch).arch
        if arch != here:
            raise MissingError(
                f"--arch {arch}: the GPU here is {here}, and TensorRT measures kernels on the GPU"
                " that they are for",
                hint=f"Export on a machine with {arch}, or use --target tensorrt-rtx.",
            )

    def runs_here(self, precision: str, device: str, *, asked: bool) -> bool:
        try:
            self.require(None)
        except MissingError:
            return False
        return True

    def lowering(self, device: str, *, arch: str | None = None, options: Any = None) -> str:
        return lowering(getattr(options, "route", "onnx"))

    def check_shapes(self, request: LoweringRequest) -> None:
        profiles_of(request.inputs, request.ranges, request.options, request.sums, request.steps)

    def lower(self, request: LoweringRequest) -> Artifact:
        return lower_to_tensorrt(request, self.library)


class TensorRTRTX(TensorRT):
    """An engine for any GPU of several kinds, made on any machine."""

    name = RTX.name
    library = RTX
    architectures = "sm120 (RTX 5090), sm89 (L4, RTX 4090), sm86 (RTX 3090)"
    options = TensorRTRTXOptions

    def arch_of(self, options: Any) -> str | None:
        compute = sorted(options.compute if options else (), key=float)
        return f"sm{compute[0].replace('.', '')}" if compute else None

    def require_arch(self, arch: str, options: Any) -> None:
        trt = import_tensorrt(f"--target {self.name}", self.library)
        built_for(trt, options or self.options(), arch)

    def runs_here(self, precision: str, device: str, *, asked: bool) -> bool:
        return torch.cuda.is_available() and super().runs_here(precision, device, asked=asked)

    def open_twin(self, path: Path, threads: int | None) -> Session:
        return open_twin(path.with_name(NETWORK_FILE), threads)
