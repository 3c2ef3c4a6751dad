"""The registry of targets: ours by name, those of other packages by entry point."""

import pkgutil
from typing import TYPE_CHECKING, Any, Literal

from enginecast.errors import UsageError
from enginecast.plugins import Registry

if TYPE_CHECKING:
    from enginecast.exporters.target import Target

TARGETS = {
    "onnxruntime": "enginecast.exporters.onnx.target:OnnxRuntime",
    "tensorrt": "enginecast.exporters.tensorrt.target:TensorRT",
    "tensorrt-rtx": "enginecast.exporters.tensorrt.target:TensorRTRTX",
    "aotinductor": "enginecast.exporters.aotinductor.target:AOTInductor",
    "openvino": "enginecast.exporters.openvino.target:OpenVINO",
    "torchscript": "enginecast.exporters.torchscript.target:TorchScript",
}
TargetName = Literal[
    "onnxruntime", "tensorrt", "tensorrt-rtx", "aotinductor", "openvino", "torchscript"
]
"""For type checkers, which do not know the targets of other packages."""
DEFAULT: TargetName = "onnxruntime"
"""What an engine is made for when nobody says it."""
OPTIONS = {
    "tensorrt": "enginecast.exporters.tensorrt.options:TensorRTOptions",
    "tensorrt-rtx": "enginecast.exporters.tensorrt.options:TensorRTRTXOptions",
}
"""The dataclasses of their own options, which are read without torch."""
REGISTRY = Registry("target", "enginecast.targets", TARGETS, UsageError)


def target_of(name: str) -> "Target":
    """The target of this name.

    Raises:
        UsageError: there is none.
        DefectError: it cannot be loaded or is not a target.
    """
    from enginecast.exporters.target import Target  # here, so that listing does not import torch

    return REGISTRY.load(name, Target)()


def options_of(name: str) -> Any:
    """The dataclass of a target's own options; None: it has none.  Of ours, without torch.

    Raises:
        UsageError: there is no such target.
    """
    REGISTRY.require(name)
    if name not in TARGETS:
        return target_of(name).options
    return pkgutil.resolve_name(OPTIONS[name]) if name in OPTIONS else None
