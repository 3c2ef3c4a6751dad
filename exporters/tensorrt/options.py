"""The user's options for a TensorRT build, beyond precision and shapes."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from enginecast.errors import UsageError
from enginecast.option_fields import TARGET_OPTION, Option, require_choices

Route = Literal["onnx", "torch"]
Hardware = Literal["none", "ampere+", "same-capability"]
ROUTES: tuple[Route, ...] = ("onnx", "torch")
HARDWARE: tuple[Hardware, ...] = ("none", "ampere+", "same-capability")
LEVELS = range(6)
_SIZE = re.compile(r"(\d+) ?([KMG])i?B?", re.IGNORECASE)
_build = partial(Option, commands=("export",))
_POWERS = {"k": 10, "m": 20, "g": 30}


def parse_workspace(text: str) -> int:
    """Bytes, from a size such as "4GiB"."""
    found = _SIZE.fullmatch(text.strip())
    if found is None or int(found[1]) == 0:
        raise UsageError(
            f"--target-option workspace={text}: expected a size such as 4GiB or 512MiB"
        )
    return int(found[1]) << _POWERS[found[2].lower()]


def parse_optimal(texts: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Shapes by the names of inputs, from texts such as "ids=1x128"."""
    found: dict[str, tuple[int, ...]] = {}
    for text in texts:
        name, _, shape = text.partition("=")
        if not name or not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", shape):
            raise UsageError(f"--target-option opt-shape={text}: expected NAME=1x128")
        if name in found:
            first = "x".join(map(str, found[name]))
            raise UsageError(
                f"--target-option opt-shape={text}: {name} already has a shape, {first}"
            )
        found[name] = tuple(int(size) for size in shape.split("x"))
    return found


@dataclass(frozen=True)
class TensorRTOptions:
    """Options of one build; the defaults are those of an engine for this machine alone."""

    route: Annotated[
        Route,
        Option("Go through ONNX or torch_tensorrt.", "onnx|torch", choices=ROUTES),
    ] = "onnx"
    """"onnx": our ONNX through tensorrt.OnnxParser; "torch": torch_tensorrt."""
    optimal: Annotated[
        Mapping[str, tuple[int, ...]],
        Option(
            "Shape to tune an input for; repeatable.",
            "NAME=1x128",
            flag="opt-shape",
            parse=parse_optimal,
        ),
    ] = field(default_factory=dict)
    """By name of the input; others are tuned for the largest shape."""
    workspace: Annotated[
        int | None,
        _build(
            "GPU memory per layer, such as 4GiB.",
            "SIZE",
            parse=parse_workspace,
        ),
    ] = None
    """Bytes that a layer may take besides its tensors; None: TensorRT's default."""
    timing_cache: Annotated[
        Path | None,
        _build(
            "Folder for timing caches.",
            "DIR",
        ),
    ] = None
    """None: the user's cache folder."""
    refit: Annotated[
        bool,
        _build(
            "Let weights be changed later.",
        ),
    ] = False
    strip_weights: Annotated[
        bool,
        _build(
            "Store the weights outside the plan.",
        ),
    ] = False
    """They are filled in from the bundle when it is loaded."""
    version_compatible: Annotated[
        bool,
        _build(
            "Let newer TensorRT versions load the plan.",
        ),
    ] = False
    hardware: Annotated[
        Hardware,
        _build(
            "Other GPUs that can load the plan.",
            "|".join(HARDWARE),
            choices=HARDWARE,
        ),
    ] = "none"
    level: Annotated[
        int | None,
        _build(
            "How hard to search for kernels.",
            "0..5",
        ),
    ] = None
    """None: TensorRT's default, 3."""

    def __post_init__(self) -> None:
        require_choices(self, TARGET_OPTION)
        if self.level is not None and self.level not in LEVELS:
            given = TARGET_OPTION.format("level", self.level)
            raise UsageError(f"{given}: expected {LEVELS[0]} to {LEVELS[-1]}")
