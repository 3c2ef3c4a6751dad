"""Measurements of earlier TensorRT builds on this machine: the timing cache, and build times.

    ~/.cache/enginecast/tensorrt/NVIDIA-H200_sm90_tensorrt-11.0.0.114_cuda-13_driver-580.95.05.cache
    ~/.cache/enginecast/tensorrt/NVIDIA-H200_sm90_....history.json

Both hold for one GPU and one set of versions.  A timing cache is read by C++ that trusts it, so it
lies in a folder of the user's own, behind a digest, and is replaced as a whole.
"""

import hashlib
import os
import re
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from enginecast.errors import BundleError
from enginecast.runtime.bundle.staging import write_file

Say = Callable[[str], None]
HEAD = b"enginecast timing cache 1\n"
KEPT = 32
"""Builds that are remembered."""
_KEYS = ("gpu_name", "gpu", "tensorrt", "cuda", "driver")


class Build(Struct, frozen=True):
    """One build that went well."""

    layers: Annotated[int, Meta(gt=0)]
    """Of the network before TensorRT fused them."""
    weights: int
    """Bytes."""
    level: int
    """How long TensorRT searched, 0 to 5."""
    seconds: Annotated[float, Meta(ge=0)]


class _History(Struct, frozen=True):
    """The file that remembers builds."""

    builds: tuple[Build, ...]
    """Oldest first."""


@dataclass(frozen=True)
class Memory:
    """The files of one GPU and one set of versions."""

    cache: Path
    history: Path


def memory_of(folder: Path | None, machine: Mapping[str, str]) -> Memory:
    """The files that remember builds on this machine.

    Args:
        folder: that the user named; None: that of the user's caches.
        machine: what `tensorrt_fitness.machine` says.
    """
    folder = default_folder() if folder is None else folder
    name, gpu, trt, cuda, driver = (machine[key] for key in _KEYS)
    key = f"{name}_{gpu}_tensorrt-{trt}_cuda-{cuda}_driver-{driver}"
    stem = re.sub(r"[^A-Za-z0-9._+-]+", "-", key)
    return Memory(folder / f"{stem}.cache", folder / f"{stem}.history.json")


def default_folder() -> Path:
    """The XDG base directory specification's place for caches."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # A relative path there is to be ignored, says the specification.
    root = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
    return root / "enginecast" / "tensorrt"


def attach_cache(config: Any, path: Path, say: Say) -> None:
    """Give a builder's config what was measured before; damage is reported and begun anew."""
    data = _read_cache(path, say)
    for content in (data, b""):
        cache = config.create_timing_cache(content)
        if cache is not None and config.set_timing_cache(cache, False):
            return
        if content:
            say(f"{path}: TensorRT refuses this timing cache; a new one takes its place.")


def keep_cache(config: Any, path: Path, say: Say) -> None:
    """Write what the config has measured; a disk that fails is reported."""
    cache = config.get_timing_cache()
    serialized = None if cache is None else cache.serialize()
    if serialized is None:
        say(f"{path}: TensorRT gives no timing cache, so nothing is kept of this build.")
        return
    content = bytes(memoryview(serialized))
    _write(path, HEAD + _digest(content) + b"\n" + content, say)


def read_history(path: Path, say: Say) -> tuple[Build, ...]:
    """The builds that are remembered, oldest first; a damaged list is reported."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=_History).builds
    except FileNotFoundError:
        return ()
    except (OSError, ValueError, msgspec.MsgspecError) as error:
        say(f"{path}: cannot be read, so earlier builds are forgotten: {_reason(error)}")
        return ()


def keep_build(path: Path, build: Build, earlier: tuple[Build, ...], say: Say) -> None:
    """Add a build to those before it."""
    history = msgspec.json.encode(_History((*earlier, build)[-KEPT:]))
    _write(path, msgspec.json.format(history, indent=1) + b"\n", say)


def estimate(layers: int, level: int, earlier: tuple[Build, ...]) -> str:
    """How long a build may take, as a sentence.

    TensorRT measures kernels layer by layer, so the time of earlier builds is scaled by the number
    of layers.  The timing cache makes a second build of a model shorter than this says.
    """
    alike = [one for one in earlier if one.level == level]
    if not alike:
        return (
            f"TensorRT builds {layers} layers. How long is not known: no build at level {level} was"
            " timed on this GPU with these versions; minutes are usual. Ctrl-C stops it."
        )
    times = sorted(one.seconds * layers / one.layers for one in alike)
    span = f", {_time(times[0])} to {_time(times[-1])}" if len(times) > 1 else ""
    builds = "build" if len(times) == 1 else "builds"
    return (
        f"TensorRT builds {layers} layers, in about {_time(statistics.median(times))} by"
        f" {len(times)} earlier {builds} on this GPU{span}. Ctrl-C stops it."
    )


def _read_cache(path: Path, say: Say) -> bytes:
    """The content behind the digest; nothing when there is none that holds."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return b""
    except OSError as error:
        say(f"{path}: cannot be read, so a new timing cache takes its place: {_reason(error)}")
        return b""
    head, _, content = data.removeprefix(HEAD).partition(b"\n")
    if not data.startswith(HEAD) or head != _digest(content):
        say(f"{path}: this timing cache is damaged; a new one takes its place.")
        return b""
    return content


def _digest(content: bytes) -> bytes:
    return hashlib.sha256(content).hexdigest().encode()


def _write(path: Path, data: bytes, say: Say) -> None:
    """A cache that cannot be kept costs time, and no engine."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_file(path, data)
    except (OSError, BundleError) as error:
        say(f"{path}: cannot be written, so the next build starts anew: {_reason(error)}")


def _reason(error: Exception) -> str:
    return str(getattr(error, "strerror", None) or error).splitlines()[0]


def _time(seconds: float) -> str:
    if seconds < 100:
        return f"{max(1, round(seconds))} s"
    return f"{round(seconds / 60)} min"
