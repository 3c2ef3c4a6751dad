"""What engines that torch runs have in common: providers, devices, arrays as tensors and back.

torch is imported when such an engine is opened or run, and not before.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from enginecast.errors import MissingError, UsageError
from enginecast.runtime.arrays import BFLOAT16, Array
from enginecast.runtime.device_tensor import DeviceTensor, Feed
from enginecast.runtime.manifest import EngineRecord

PROVIDERS = {"CPUExecutionProvider": "torch-cpu", "CUDAExecutionProvider": "torch-cuda"}
"""What runs an engine of torch where ONNX Runtime's provider was asked for."""


class Threads:
    """torch has one number of threads for the whole process, so runs with an own one go one by
    one.
    """

    def __init__(self, count: int | None) -> None:
        self._count = count
        self._lock = threading.Lock()

    @contextmanager
    def __call__(self) -> Iterator[None]:
        import torch

        if self._count is None:
            yield
            return
        with self._lock:
            before = torch.get_num_threads()
            torch.set_num_threads(self._count)
            try:
                yield
            finally:
                torch.set_num_threads(before)


def provider_of(name: str, kind: str) -> str:
    """ "torch-cpu" for "CPUExecutionProvider"; its own names stay.

    Raises:
        UsageError: a provider of ONNX Runtime that torch has nothing like.
    """
    if name in PROVIDERS.values():
        return name
    if name not in PROVIDERS:
        raise UsageError(
            f"{name}: a {kind} engine runs on {' or '.join(PROVIDERS.values())}",
            hint="Use device='cpu' or device='cuda' (--device).",
        )
    return PROVIDERS[name]


def device_of(provider: str) -> str:
    """ "cpu" or "cuda"."""
    return provider.removeprefix("torch-")


def require_torch(record: EngineRecord, kind: str) -> Any:
    """The module torch.

    Args:
        kind: of engine, for people: "TorchScript".

    Raises:
        MissingError: it is not installed.
    """
    try:
        import torch
    except ImportError as error:
        raise MissingError(
            f"{record.file}: a {kind} engine needs torch, which is not installed: {error}",
            hint="pip install torch, or export with --target onnxruntime.",
        ) from error
    return torch


def require_device(torch: Any, record: EngineRecord, provider: str, why: str) -> None:
    """Refuse a device that is not here, or that the engine was not made for.

    Args:
        why: what binds the engine to its device.

    Raises:
        MissingError: there is no GPU.
        UsageError: the engine was made for another device.
    """
    if provider == "torch-cuda" and not torch.cuda.is_available():
        raise MissingError(
            "device cuda: torch sees no CUDA GPU here", hint="See `enginecast doctor`."
        )
    if record.providers and provider not in record.providers:
        raise UsageError(
            f"{record.file}: made for {record.providers[0]}, not for {provider}: {why}",
            hint="Export it with the other --device, on a machine that has it.",
        )


def to_tensor(name: str, feed: Feed, device: str) -> Any:
    """A copy on a device: the model may write into its inputs.

    Raises:
        InputError: a tensor on another device.
    """
    import torch

    if isinstance(feed, DeviceTensor):
        feed.require_on(name, device, torch.cuda.current_device() if device == "cuda" else 0)
        return feed.tensor.clone()
    return as_tensor(feed.copy()).to(device)


def as_tensor(array: Array) -> Any:
    """A tensor that shares the array's memory; a copy of an array that may not be written."""
    import torch

    if not array.flags.writeable:
        array = array.copy()  # torch has no such tensors, and warns
    if array.dtype == BFLOAT16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def to_host(value: Any) -> Array:
    """A tensor as an array in CPU memory."""
    import torch

    tensor = value.detach().cpu().contiguous()
    if tensor.dtype != torch.bfloat16:
        return np.asarray(tensor.numpy())
    return np.asarray(tensor.view(torch.int16).numpy().view(BFLOAT16))
