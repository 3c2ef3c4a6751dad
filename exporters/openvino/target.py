"""The OpenVINO target."""

from typing import Any

from enginecast.errors import UsageError
from enginecast.exporters.openvino.lower import lower_to_openvino, lowering
from enginecast.exporters.target import Artifact, LoweringRequest, Target
from enginecast.runtime.sessions.openvino import computes_bf16, require_openvino

PRECISIONS = ("fp32", "bf16")


class OpenVINO(Target):
    """An ONNX graph with its weights beside it, which OpenVINO compiles when it is loaded."""

    name = "openvino"
    arithmetic = "openvino"
    has_skip_norm = False
    only_device = "cpu"
    holds_weights = True
    accepts_second = True
    is_second = True

    def check_precision(self, precision: str) -> None:
        if precision not in PRECISIONS:
            raise UsageError(
                f"--precision {precision} does not fit --target openvino, which computes in"
                f" {' and '.join(PRECISIONS)} here",
                hint=f"Use one of these, or --target onnxruntime for {precision}.",
            )

    def require(self, options: Any) -> None:
        require_openvino("--target openvino")

    def runs_here(self, precision: str, device: str, *, asked: bool) -> bool:
        return precision != "bf16" or computes_bf16()

    def lowering(self, device: str, *, arch: str | None = None, options: Any = None) -> str:
        return lowering()

    def lower(self, request: LoweringRequest) -> Artifact:
        return lower_to_openvino(request)
