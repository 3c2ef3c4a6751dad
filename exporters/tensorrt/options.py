"""The user's options for a build with TensorRT or TensorRT-RTX, beyond precision and ranges."""

import re
from collections.abc import Iterator, Mapping, Sequence
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
Shapes = tuple[tuple[int, ...], ...]
"""Least, optimal, greatest."""
Profile = dict[str, Shapes]
"""By name of the input."""
PROFILE = "--profile"
_SHAPE = re.compile(r"[1-9]\d*(x[1-9]\d*)*")
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
        if not name or not _SHAPE.fullmatch(shape):
            raise UsageError(f"--target-option opt-shape={text}: expected NAME=1x128")
        if name in found:
            first = "x".join(map(str, found[name]))
            raise UsageError(
                f"--target-option opt-shape={text}: {name} already has a shape, {first}"
            )
        found[name] = tuple(int(size) for size in shape.split("x"))
    return found


def parse_profiles(texts: Sequence[str]) -> tuple[Profile, ...]:
    """Optimization profiles, one of each text: "ids=1x16,4x64,8x256" has the least, the optimal and
    the greatest shape of an input; several inputs of one profile have a ";" between them.
    """
    return tuple(_profile(text) for text in texts)


def _profile(text: str) -> Profile:
    found: Profile = {}
    for part in text.split(";"):
        name, _, shapes = part.strip().partition("=")
        three = [shape.strip() for shape in shapes.split(",")]
        if not name or len(three) != 3 or not all(map(_SHAPE.fullmatch, three)):
            raise UsageError(
                f"{PROFILE} {text}: expected NAME=1x16,4x64,8x256, the least, the optimal and the"
                " greatest shape"
            )
        if name in found:
            raise UsageError(f"{PROFILE} {text}: {name} occurs twice; give each profile its own")
        found[name] = tuple(tuple(map(int, shape.split("x"))) for shape in three)
    return found


def _require_order(profiles: Sequence[Profile]) -> None:
    """Refuse shapes of an input that are of several ranks, or not in order."""
    ranks: dict[str, int] = {}
    for name, shapes in (each for profile in profiles for each in profile.items()):
        text = f"{PROFILE} {name}={','.join('x'.join(map(str, shape)) for shape in shapes)}"
        if (
            len(shapes) != 3
            or len({*map(len, shapes)}) > 1
            or any(not low <= best <= high for low, best, high in zip(*shapes, strict=True))
        ):
            raise UsageError(
                f"{text}: expected three shapes of one rank, of which none has a greater size than"
                " the next"
            )
        rank = len(shapes[0])
        if ranks.setdefault(name, rank) != rank:
            raise UsageError(f"{text}: expected rank {ranks[name]}, as in its first profile")


def parse_compute(texts: Sequence[str]) -> tuple[str, ...]:
    """Compute capabilities, from texts such as "8.6,8.9"."""
    text = ",".join(texts)
    found = tuple(each.strip() for each in text.split(","))
    if not all(re.fullmatch(r"\d+\.\d", each) for each in found) or len({*found}) < len(found):
        raise UsageError(f"--compute {text}: expected compute capabilities, such as 8.6,8.9")
    return found


@dataclass(frozen=True)
class NetworkOptions:
    """What both libraries have."""

    optimal: Annotated[
        Mapping[str, tuple[int, ...]],
        Option(
            "Shape to tune an input for; repeatable.",
            "NAME=1x128",
            flag="opt-shape",
            parse=parse_optimal,
        ),
    ] = field(default_factory=dict)
    """By name of the input; makes one profile of the whole range, tuned for it."""
    profiles: Annotated[
        Sequence[Profile],
        Option(
            "Least, optimal and greatest shape of a profile; repeatable. --profile for short.",
            "NAME=1x16,4x64,8x256",
            flag="profile",
            parse=parse_profiles,
        ),
    ] = ()
    """Three shapes of each input; an input that is left out has every size of its range.  Empty:
    `profiles.default_profiles`."""
    refit: Annotated[
        bool,
        _build(
            "Let weights be changed later.",
        ),
    ] = False
    strip_weights: Annotated[
        bool,
        _build(
            "Store the weights outside the plan. --strip-weights for short.",
        ),
    ] = False
    """They are filled in from the bundle when it is loaded."""

    def sizes(self) -> Iterator[tuple[str, int, int, int]]:
        """Name of an input, number of a dimension, and the least and greatest size that the
        profiles have of it.
        """
        for name in dict.fromkeys(name for profile in self.profiles for name in profile):
            shapes = [profile[name] for profile in self.profiles if name in profile]
            for number, sizes in enumerate(
                zip(*(s for three in shapes for s in three), strict=False)
            ):
                yield name, number, min(sizes), max(sizes)

    def __post_init__(self) -> None:
        require_choices(self, TARGET_OPTION)
        _require_order(self.profiles)
        if self.optimal and self.profiles:
            raise UsageError(
                "opt-shape and profile do not go together: a profile has its own optimal shape"
            )


@dataclass(frozen=True)
class TensorRTOptions(NetworkOptions):
    """Options of one build; the defaults are those of an engine for this machine alone."""

    route: Annotated[
        Route,
        Option("Go through ONNX or torch_tensorrt.", "onnx|torch", choices=ROUTES),
    ] = "onnx"
    """"onnx": our ONNX through tensorrt.OnnxParser; "torch": torch_tensorrt."""
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
        super().__post_init__()
        if self.level is not None and self.level not in LEVELS:
            given = TARGET_OPTION.format("level", self.level)
            raise UsageError(f"{given}: expected {LEVELS[0]} to {LEVELS[-1]}")


@dataclass(frozen=True)
class TensorRTRTXOptions(NetworkOptions):
    """Options of one build with TensorRT-RTX; the defaults are those of a portable engine."""

    compute: Annotated[
        Sequence[str],
        Option(
            "Compute capabilities to build for. --compute for short.",
            "8.6,8.9",
            parse=parse_compute,
        ),
    ] = ()
    """Such as ("8.6", "8.9"); empty: that of `--arch`, or the library's own choice, which is 8.0,
    8.6, 8.9, 12.0 and later ones
    (https://docs.nvidia.com/deeplearning/tensorrt-rtx/latest/inference-library/cpu-engines.html)."""
