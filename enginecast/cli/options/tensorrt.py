"""The options of a TensorRT build, as the command line has them."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, ClassVar

import typer

from enginecast.errors import UsageError
from enginecast.exporters.tensorrt.options import HARDWARE, LEVELS, ROUTES, TensorRTOptions

_SIZE = re.compile(r"(\d+) ?([KMG])i?B?", re.IGNORECASE)
_POWERS = {"k": 10, "m": 20, "g": 30}


@dataclass(frozen=True)
class NetworkFlags:
    """What TensorRT reads."""

    PANEL: ClassVar[str] = "TensorRT"

    trt_route: Annotated[
        str | None,
        typer.Option(metavar="onnx|torch", help="Go through ONNX or torch_tensorrt."),
    ] = None
    opt_shape: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=1x128",
            help="Shape to tune an input for; repeatable.",
        ),
    ] = None

    def options(self) -> TensorRTOptions | None:
        """What was given on the command line; None: nothing was."""
        if all(getattr(self, field.name) in (field.default, []) for field in fields(self)):
            return None
        route = self.trt_route or "onnx"
        if route not in ROUTES:
            raise UsageError(f"--trt-route {route}: expected {' or '.join(ROUTES)}")
        return TensorRTOptions(route, _opt_shapes(self.opt_shape or ()))


@dataclass(frozen=True)
class TensorRTFlags(NetworkFlags):
    """What TensorRT reads, and how it builds."""

    PANEL: ClassVar[str] = "TensorRT"

    trt_workspace: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="GPU memory per layer, such as 4GiB."),
    ] = None
    trt_timing_cache: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder for timing caches.")
    ] = None
    trt_refit: Annotated[
        bool, typer.Option("--trt-refit", help="Let weights be changed later.")
    ] = False
    trt_strip_weights: Annotated[
        bool,
        typer.Option("--trt-strip-weights", help="Store the weights outside the plan."),
    ] = False
    trt_version_compatible: Annotated[
        bool,
        typer.Option("--trt-version-compatible", help="Let newer TensorRT versions load the plan."),
    ] = False
    trt_hardware: Annotated[
        str | None,
        typer.Option(metavar="|".join(HARDWARE), help="Other GPUs that can load the plan."),
    ] = None
    trt_level: Annotated[
        int | None, typer.Option(metavar="0..5", help="How hard to search for kernels.")
    ] = None

    def options(self) -> TensorRTOptions | None:
        network = super().options()
        if network is None:
            return None
        hardware, level = self.trt_hardware or "none", self.trt_level
        if hardware not in HARDWARE:
            raise UsageError(f"--trt-hardware {hardware}: expected one of {', '.join(HARDWARE)}")
        if level is not None and level not in LEVELS:
            raise UsageError(f"--trt-level {level}: expected {LEVELS[0]} to {LEVELS[-1]}")
        return replace(
            network,
            workspace=None if self.trt_workspace is None else _bytes(self.trt_workspace),
            timing_cache=self.trt_timing_cache,
            refit=self.trt_refit,
            strip_weights=self.trt_strip_weights,
            version_compatible=self.trt_version_compatible,
            hardware=hardware,
            level=level,
        )


def _bytes(text: str) -> int:
    found = _SIZE.fullmatch(text.strip())
    if found is None or int(found[1]) == 0:
        raise UsageError(f"--trt-workspace {text}: expected a size such as 4GiB or 512MiB")
    return int(found[1]) << _POWERS[found[2].lower()]


def _opt_shapes(texts: Sequence[str]) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {}
    for text in texts:
        name, _, shape = text.partition("=")
        if not name or not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", shape):
            raise UsageError(f"--opt-shape {text}: expected NAME=1x128")
        if name in found:
            first = "x".join(map(str, found[name]))
            raise UsageError(f"--opt-shape {text}: {name} already has a shape, {first}")
        found[name] = tuple(int(size) for size in shape.split("x"))
    return found
