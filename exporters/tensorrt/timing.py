"""Measurements of earlier TensorRT builds on this machine: the timing cache.

    ~/.cache/enginecast/tensorrt/NVIDIA-H200_sm90_tensorrt-11.0.0.114_cuda-13_driver-580.95.05.cache

One holds for one GPU and one set of versions.  It is read by C++ that trusts it, so it lies in a
folder of the user's own, behind a digest, and is replaced as a whole.
"""

import hashlib
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from enginecast.errors import BundleError
from enginecast.runtime.bundle.staging import write_file

Say = Callable[[str], None]
HEAD = b"enginecast timing cache 1\n"
_KEYS = ("gpu_name", "gpu", "tensorrt", "cuda", "driver")


def cache_of(folder: Path | None, machine: Mapping[str, str]) -> Path:
    """The timing cache of this machine.

    Args:
        folder: that the user named; None: that of the user's caches.
        machine: what `fitness.machine` says.
    """
    folder = default_folder() if folder is None else folder
    name, gpu, trt, cuda, driver = (machine[key] for key in _KEYS)
    key = f"{name}_{gpu}_tensorrt-{trt}_cuda-{cuda}_driver-{driver}"
    return folder / f"{re.sub(r'[^A-Za-z0-9._+-]+', '-', key)}.cache"


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
