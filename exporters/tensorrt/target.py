"""The TensorRT target."""

from typing import Any

from enginecast.errors import MissingError, UsageError
from enginecast.exporters.target import Artifact, LoweringRequest, Target
from enginecast.exporters.tensorrt.lower import lower_to_tensorrt, lowering, require_tensorrt
from enginecast.exporters.tensorrt.options import TensorRTOptions
from enginecast.passes.presets import QUANTIZED


class TensorRT(Target):
    """An engine for one GPU model, made on it."""

    name = "tensorrt"
    arithmetic = "tensorrt"
    options = TensorRTOptions
    products = "tensorrt"
    copies = 2  # in the engine, and in the network that it is built from
    accepts_second = True
    only_device = "cuda"
    scales_as_computed = True

    def check_precision(self, precision: str) -> None:
        if precision in QUANTIZED and QUANTIZED[precision].format != "fp8":
            raise UsageError(
                f"--precision {precision} does not fit --target tensorrt: it needs dynamic scales"
                " for each row, or packed blocks of integers, and TensorRT has neither",
                hint="Use --precision fp8, fp8-storage, fp16, bf16 or fp32.",
            )

    def quantized_dtype(self, device: str) -> str:
        return "fp16"  # as on ONNX Runtime, so that one program makes an engine for both

    def require(self, options: Any) -> None:
        require_tensorrt(options or TensorRTOptions())

    def runs_here(self, precision: str, device: str, *, asked: bool) -> bool:
        try:
            self.require(None)
        except MissingError:
            return False
        return True

    def lowering(self, device: str, *, arch: str | None = None, options: Any = None) -> str:
        return lowering((options or TensorRTOptions()).route)

    def lower(self, request: LoweringRequest) -> Artifact:
        return lower_to_tensorrt(request)
