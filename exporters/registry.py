"""The registry of targets: ours by name, those of other packages by entry point."""

from typing import TYPE_CHECKING, Literal

from enginecast.errors import UsageError
from enginecast.plugins import Registry

if TYPE_CHECKING:
    from enginecast.exporters.target import Target

TARGETS = {
    "onnxruntime": "enginecast.exporters.onnx.target:OnnxRuntime",
    "tensorrt": "enginecast.exporters.tensorrt.target:TensorRT",
    "aotinductor": "enginecast.exporters.aotinductor.target:AOTInductor",
    "openvino": "enginecast.exporters.openvino.target:OpenVINO",
    "torchscript": "enginecast.exporters.torchscript.target:TorchScript",
}
TargetName = Literal["onnxruntime", "tensorrt", "aotinductor", "openvino", "torchscript"]
"""For type checkers, which do not know the targets of other packages."""
DEFAULT: TargetName = "onnxruntime"
"""What an engine is made for when nobody says it."""
REGISTRY = Registry("target", "enginecast.targets", TARGETS, UsageError)


def target_of(name: str) -> "Target":
    """The target of this name.

    Raises:
        UsageError: there is none.
        DefectError: it cannot be loaded or is not a target.
    """
    from enginecast.exporters.target import Target  # here, so that listing does not import torch

    return REGISTRY.load(name, Target)()
