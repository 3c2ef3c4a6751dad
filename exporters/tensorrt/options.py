"""The user's options for a TensorRT build, beyond precision and shapes."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

Route = Literal["onnx", "torch"]
Hardware = Literal["none", "ampere+", "same-capability"]
ROUTES: tuple[Route, ...] = ("onnx", "torch")
HARDWARE: tuple[Hardware, ...] = ("none", "ampere+", "same-capability")
LEVELS = range(6)


@dataclass(frozen=True)
class TensorRTOptions:
    """Options of one build; the defaults are those of an engine for this machine alone."""

    route: Route = "onnx"
    """"onnx": our ONNX through tensorrt.OnnxParser; "torch": torch_tensorrt."""
    optimal: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """The shape to tune an input for, by its name; others are tuned for the largest shape."""
    workspace: int | None = None
    """Bytes of GPU memory that a layer may take besides its tensors; None: TensorRT's default."""
    timing_cache: Path | None = None
    """Folder of timing caches; None: the user's cache folder."""
    refit: bool = False
    """The weights can be changed afterwards."""
    strip_weights: bool = False
    """The plan holds no weights; they are filled in from the bundle when it is loaded."""
    version_compatible: bool = False
    """Newer versions of TensorRT can load the plan, too."""
    hardware: Hardware = "none"
    """Which other GPUs can load the plan."""
    level: int | None = None
    """How long TensorRT searches, 0 to 5; None: its default, 3."""
