"""The options of a TensorRT build, as the command line has them."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from enginecast.errors import UsageError
from enginecast.exporters.tensorrt_options import (
    HARDWARE,
    LEVELS,
    ROUTES,
    TensorRTOptions,
)

TrtRoute = Annotated[
    str | None,
    typer.Option("--trt-route", metavar="onnx|torch", help="TensorRT: by ONNX, or torch_tensorrt."),
]
OptShapes = Annotated[
    list[str] | None,
    typer.Option(
        "--opt-shape",
        metavar="NAME=1x128",
        help="TensorRT: the shape to tune an input for; repeatable.",
    ),
]
TrtWorkspace = Annotated[
    str | None,
    typer.Option("--trt-workspace", metavar="SIZE", help="TensorRT: GPU memory for a layer: 4GiB."),
]
TrtTimingCache = Annotated[
    Path | None,
    typer.Option("--trt-timing-cache", metavar="DIR", help="TensorRT: folder of timing caches."),
]
TrtRefit = Annotated[
    bool, typer.Option("--trt-refit", help="TensorRT: weights can be changed afterwards.")
]
TrtStripWeights = Annotated[
    bool,
    typer.Option("--trt-strip-weights", help="TensorRT: keep the weights beside the plan."),
]
TrtVersionCompatible = Annotated[
    bool,
    typer.Option("--trt-version-compatible", help="TensorRT: newer versions can load the plan."),
]
TrtHardware = Annotated[
    str | None,
    typer.Option(
        "--trt-hardware", metavar="|".join(HARDWARE), help="TensorRT: which other GPUs can load it."
    ),
]
TrtLevel = Annotated[
    int | None,
    typer.Option("--trt-level", metavar="0..5", help="TensorRT: how long to search for kernels."),
]
_SIZE = re.compile(r"(\d+) ?([KMG])i?B?", re.IGNORECASE)
_POWERS = {"k": 10, "m": 20, "g": 30}


def tensorrt_options(
    route: str | None = None,
    opt_shapes: Sequence[str] | None = None,
    workspace: str | None = None,
    timing_cache: Path | None = None,
    refit: bool = False,
    strip_weights: bool = False,
    version_compatible: bool = False,
    hardware: str | None = None,
    level: int | None = None,
) -> TensorRTOptions | None:
    """What was given on the command line; None: nothing was.

    Raises:
        UsageError: names the option, what was expected and what was got.
    """
    given = (route, opt_shapes, workspace, timing_cache, hardware, level)
    if all(one in (None, []) for one in given) and not (
        refit or strip_weights or version_compatible
    ):
        return None
    if route is not None and route not in ROUTES:
        raise UsageError(f"--trt-route {route}: expected {' or '.join(ROUTES)}")
    if hardware is not None and hardware not in HARDWARE:
        raise UsageError(f"--trt-hardware {hardware}: expected one of {', '.join(HARDWARE)}")
    if level is not None and level not in LEVELS:
        raise UsageError(f"--trt-level {level}: expected {LEVELS[0]} to {LEVELS[-1]}")
    return TensorRTOptions(
        route=route or "onnx",
        optimal=_opt_shapes(opt_shapes or ()),
        workspace=None if workspace is None else _bytes(workspace),
        timing_cache=timing_cache,
        refit=refit,
        strip_weights=strip_weights,
        version_compatible=version_compatible,
        hardware=hardware or "none",
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
            raise UsageError(f"--opt-shape {text}: {name} has a shape already, {first}")
        found[name] = tuple(int(size) for size in shape.split("x"))
    return found
